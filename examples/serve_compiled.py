"""Serve a converted model without Python's overhead: compile it for every length, or export it to one file.

torch.compile and torch.export trace the layers as plain torch, so that a compiler can fuse them with
their neighbours.
"""

import tempfile

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import dynorm

Batch = tuple[Tensor, Tensor]


class Embedder(nn.Module):
    """A model that returns one mean-pooled embedding per text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings of shape (B, C)."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        mask = attention_mask.unsqueeze(-1)
        return (output.last_hidden_state * mask).sum(1) / mask.sum(1)


def random_texts(count: int, length: int) -> Batch:
    """Return random texts of several lengths, padded, and their mask."""
    lengths = torch.randint(2, length + 1, (count, 1))
    mask = torch.arange(length) < lengths
    mask[0] = True
    ids = torch.randint(1, 100, (count, length))
    return ids * mask, mask.long()


def check_compiled(model: nn.Module, example: Batch, texts: list[Batch]) -> None:
    """Compile the model once, and check that it serves every batch size and length."""
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    largest = 0.0
    # Numbers in the code of a model are constants. To take them for inputs first compiles it twice.
    with torch._dynamo.config.patch(specialize_float=True):
        compiled(*example)
    with torch._dynamo.config.patch(specialize_float=True, error_on_recompile=True):
        for batch in texts:
            expected = model(*batch)
            actual = compiled(*batch)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            error = (actual - expected).abs().max().item()
            largest = max(largest, error)
    print(f"compiled: off by {largest:.1e}")


def check_exported(model: nn.Module, example: Batch, texts: list[Batch]) -> None:
    """Export the model to a file, and check that the file has no norm and the same outputs."""
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, example, dynamic_shapes=(dynamic, dynamic))
    operations = set()
    for node in program.run_decompositions().graph.nodes:
        if node.op == "call_function":
            operations.add(str(node.target))
    norms = sorted(name for name in operations if "layer_norm" in name or "var" in name)
    print(f"exported: {len(operations)} kinds of operations, norms among them: {norms or 'none'}")
    if norms:
        raise SystemExit("no norm should be left in the graph")

    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(program, f"{folder}/model.pt2")
        loaded = torch.export.load(f"{folder}/model.pt2").module()
    for batch in texts:
        expected = model(*batch)
        actual = loaded(*batch)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def main() -> None:
    """Convert a small BERT, then compile and export it."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = Embedder(BertModel(config)).eval()
    example = random_texts(8, 16)
    sites = dynorm.find_norms(model, *example)
    dynorm.convert_(model, sites, witnesses=0)
    dynorm.calibrate_(model, [example])

    texts = [random_texts(3, 7), random_texts(5, 21), random_texts(8, 16)]
    check_compiled(model, example, texts)
    check_exported(model, example, texts)


if __name__ == "__main__":
    main()
