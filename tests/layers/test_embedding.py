import torch

from quire.layers.embedding import Embedding, Head
from quire.layers.scope import Scope


def test_a_tied_head_uses_the_embeddings_own_memory(scope: Scope) -> None:
    """A head that copies the weight: twice the memory, or memory that loading never fills."""
    embedding = Embedding(8, 4, scope / "embed")
    head = Head(8, 4, scope / "lm_head", tied=embedding)
    assert head.table is embedding
    embedding.weight.copy_(torch.randn(8, 4))
    x = torch.randn(3, 4)
    torch.testing.assert_close(head(x), x @ embedding.weight.T)


def test_an_untied_head_has_its_own(scope: Scope) -> None:
    head = Head(8, 4, scope / "lm_head")
    ((name, target),) = head.table.targets()
    assert (name, tuple(target.shape)) == ("lm_head.weight", (8, 4))


def test_embedding_looks_rows_up(scope: Scope) -> None:
    embedding = Embedding(8, 4, scope / "embed")
    embedding.weight.copy_(torch.randn(8, 4))
    torch.testing.assert_close(embedding(torch.tensor([3, 0, 3])), embedding.weight[[3, 0, 3]])
