"""Export a converted model to ONNX: a graph with no norm and no reduction over channels, run by onnxruntime."""

import tempfile
import warnings
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import dynorm


class LastHiddenState(nn.Module):
    """A model that returns its last hidden state as a tensor, because ONNX has no dictionaries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return a tensor of shape (B, T, C)."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return output.last_hidden_state


def export(
    model: nn.Module,
    example: tuple[Tensor, Tensor],
    dynamic: dict[int, Any] | None = None,
) -> onnx.ModelProto:
    """Return the model as ONNX, for every size of the dynamic dimensions and the example's of others."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = f"{folder}/model.onnx"
        torch.onnx.export(
            model,
            example,
            path,
            input_names=["input_ids", "attention_mask"],
            dynamic_shapes=(dynamic, dynamic) if dynamic else None,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        proto = onnx.load(path)
    onnx.checker.check_model(proto)
    return proto


def norms_and_reductions(proto: onnx.ModelProto) -> list[str]:
    """Return the operations that only a norm needs, including those inside functions."""
    nodes = list(proto.graph.node)
    for function in proto.functions:
        nodes += function.node
    operations = set()
    for node in nodes:
        if "Norm" in node.op_type or node.op_type in ("ReduceMean", "ReduceSum"):
            operations.add(node.op_type)
    return sorted(operations)


def largest_error(model: nn.Module, proto: onnx.ModelProto) -> float:
    """Return the largest difference between torch and onnxruntime, at sizes other than the example's."""
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    largest = 0.0
    for rows, length in ((1, 5), (4, 17)):
        ids = torch.randint(0, 64, (rows, length))
        mask = torch.ones_like(ids)
        mask[-1, length // 2 :] = 0
        with torch.no_grad():
            expected = model(ids, mask)
        feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        (output,) = session.run(None, feeds)
        error = (torch.from_numpy(output) - expected).abs().max()
        largest = max(largest, error.item())
    return largest


def main() -> None:
    """Export with dynamic sizes, look at the graph, and run it at other sizes."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    model = LastHiddenState(BertModel(config)).eval()
    ids = torch.randint(0, 64, (2, 9))
    example = (ids, torch.ones_like(ids))
    before = norms_and_reductions(export(model, example))

    sites = dynorm.find_norms(model, *example)
    dynorm.convert_(model, sites, witnesses=0)
    dynorm.calibrate_(model, [example])
    # Every batch size and length.
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    proto = export(model, example, dynamic)
    after = norms_and_reductions(proto)
    print(f"norms and reductions: {before or 'none'} before, {after or 'none'} after")
    error = largest_error(model, proto)
    print(f"onnxruntime at other sizes: off by {error:.1e} at most")

    if not before:
        raise SystemExit("the graph of the original should have norms")
    if after:
        raise SystemExit("the graph of the converted model should have no norm")
    if not error < 1e-5:
        raise SystemExit("onnxruntime should give the outputs of torch")


if __name__ == "__main__":
    main()
