"""Serve a converted model without Python's overhead: torch.compile for every length, and torch.export to one file.

Both trace the layers as plain torch, so that a compiler can fuse them with their neighbours.
"""

import tempfile

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import dynorm


class Embedder(nn.Module):
    """Tokens in, one mean-pooled embedding per text out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings of shape (B, C)."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return (hidden * mask).sum(1) / mask.sum(1)


def texts(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return random texts of several lengths, padded."""
    mask = torch.arange(length) < torch.randint(2, length + 1, (count, 1))
    mask[0] = True
    return torch.randint(1, 100, (count, length)) * mask, mask.long()


def main() -> None:
    """Compile, export, save, load; each gives the outputs of eager mode."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    model = Embedder(BertModel(config)).eval()
    batch = texts(8, 16)
    dynorm.convert_(model, dynorm.find_norms(model, *batch), per_channel=False, witnesses=0)
    dynorm.calibrate_(model, [batch])
    tests = [texts(3, 7), texts(5, 21), texts(8, 16)]
    with torch.no_grad():
        expected = [model(*test) for test in tests]

        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        compiled(*batch)
        # One graph serves every batch size and length.
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = [compiled(*test) for test in tests]
        print(
            "compiled: off by "
            f"{max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)):.1e}"
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

        sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        program = torch.export.export(model, batch, dynamic_shapes=(sizes, sizes))
    calls = {
        str(node.target)
        for node in program.run_decompositions().graph.nodes
        if node.op == "call_function"
    }
    norms = sorted(call for call in calls if "layer_norm" in call or "var" in call)
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(program, f"{folder}/model.pt2")
        served = torch.export.load(f"{folder}/model.pt2").module()
    found = [served(*test) for test in tests]
    print(f"exported: {len(calls)} kinds of operations, norms among them: {norms or 'none'}")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if norms:
        raise SystemExit("no norm should be left in the graph")


if __name__ == "__main__":
    main()
