"""The proof behind `batch_invariant=True`: every program is shown to give the same bits before it is used."""

from cbjax.invariance.prove import InvarianceError as InvarianceError
from cbjax.invariance.prove import Proof as Proof
from cbjax.invariance.prove import prove as prove
