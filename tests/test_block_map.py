"""A map from block ids to values: what an old map shows never changes."""

from hypothesis import given
from hypothesis import strategies as st

from cbjax.scheduler.block_map import BlockMap, BlockMapDraft

NUM_BLOCKS = 300
WRITES = st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.none() | st.integers(0, 9)))


@given(drafts=st.lists(WRITES, max_size=4))
def test_every_map_shows_what_a_dict_would_and_no_later_draft_changes_it(drafts) -> None:
    blocks, content = BlockMap[int].empty(NUM_BLOCKS), {}
    seen = []
    for writes in drafts:
        draft = BlockMapDraft(blocks)
        content = dict(content)
        for block, value in writes:
            draft[block] = value
            assert draft[block] == value
            content[block] = value
        blocks = draft.freeze()
        seen.append((blocks, {block: value for block, value in content.items() if value is not None}))
    for blocks, content in seen:
        assert dict(blocks.items()) == content
        assert [block for block, _ in blocks.items()] == sorted(content)
