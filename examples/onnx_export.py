"""Take a converted model to ONNX: a graph with no norm and no reduction over channels, run by onnxruntime."""

import tempfile
import warnings

import numpy
import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import dynorm


class Hidden(nn.Module):
    """Tokens in, the last hidden state out: a tensor, for ONNX knows no dictionaries."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return a tensor of shape (B, T, C)."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def main() -> None:
    """Export with free sizes, look at the graph, run it at other sizes."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    model = Hidden(BertModel(config)).eval()
    example = torch.randint(0, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    before = norms_and_reductions(exported(model, example))
    dynorm.convert_(model, dynorm.find_norms(model, *example), per_channel=False, witnesses=0)
    dynorm.calibrate_(model, [example])
    proto = exported(model, example)
    after = norms_and_reductions(proto)
    print(f"norms and reductions: {before or 'none'} before, {after or 'none'} after")

    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    worst = 0.0
    for rows, length in ((1, 5), (4, 17)):
        ids, mask = torch.randint(0, 64, (rows, length)), torch.ones(rows, length, dtype=torch.long)
        mask[-1, length // 2 :] = 0
        with torch.no_grad():
            expected = model(ids, mask).numpy()
        (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        worst = max(worst, float(numpy.abs(found - expected).max()))
    print(f"onnxruntime at other sizes: off by {worst:.1e} at most")
    if after or not before or not worst < 1e-5:
        raise SystemExit("the graph should hold no norm and give what torch gives")


def exported(model: nn.Module, example: tuple[Tensor, ...]) -> onnx.ModelProto:
    """Return the model as ONNX, for every batch size and length."""
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = f"{folder}/model.onnx"
        torch.onnx.export(
            model, example, path, dynamo=True, dynamic_shapes=(sizes, sizes), external_data=False, verbose=False,
            input_names=["input_ids", "attention_mask"],
        )  # fmt: skip
        proto = onnx.load(path)
    onnx.checker.check_model(proto)
    return proto


def norms_and_reductions(proto: onnx.ModelProto) -> list[str]:
    """Return the operations that only a norm would need, including those inside of functions."""
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    return sorted(
        {
            n.op_type
            for n in nodes
            if "Norm" in n.op_type or n.op_type in ("ReduceMean", "ReduceSum")
        }
    )


if __name__ == "__main__":
    main()
