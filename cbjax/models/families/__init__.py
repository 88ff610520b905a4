"""Model families as table entries: how a checkpoint's configuration and tensor names become ours.

A family is one `Family` value: the names it is known by, functions that read a configuration, and name tables. Adding
one means adding its entry to `FAMILIES` in `table.py`; nothing else branches on a model's name.
"""

from cbjax.models.families.family import Family as Family
from cbjax.models.families.family import GGUFForm as GGUFForm
from cbjax.models.families.family import NameTable as NameTable
from cbjax.models.families.family import TensorRule as TensorRule
from cbjax.models.families.table import FAMILIES as FAMILIES
from cbjax.models.families.table import family_of_hf as family_of_hf
from cbjax.models.families.table import form_of_gguf as form_of_gguf
