import torch
from torch import Tensor

from quire.layers.embedding import Head, TokenEmbedding
from quire.layers.scope import Scope


def filled(embedding: TokenEmbedding) -> Tensor:
    """Fill the layer with random vectors and return them."""
    (target,) = embedding.targets()
    target.tensor.copy_(torch.randn(8, 4))
    embedding.finish()
    return target.tensor.clone()


def test_tied_head_shares_the_embeddings_memory(scope: Scope) -> None:
    """Check that the head does not copy the weight."""
    embedding = TokenEmbedding(8, 4, scope / "embed")
    head = Head(8, 4, scope / "lm_head", tied=embedding)
    assert head.table is embedding
    vectors = filled(embedding)
    x = torch.randn(3, 4)
    torch.testing.assert_close(head(x), x @ vectors.T)
    assert torch.equal(head.rows([5, 1]), vectors[[5, 1]])


def test_untied_head_has_its_own_weight(scope: Scope) -> None:
    head = Head(8, 4, scope / "lm_head")
    (target,) = head.table.targets()
    assert (target.name, tuple(target.tensor.shape)) == ("lm_head.weight", (8, 4))


def test_embedding_looks_up_rows(scope: Scope) -> None:
    embedding = TokenEmbedding(8, 4, scope / "embed")
    vectors = filled(embedding)
    torch.testing.assert_close(embedding(torch.tensor([3, 0, 3])), vectors[[3, 0, 3]])
