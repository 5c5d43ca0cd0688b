"""Use the layers in a model of your own as you would nn.LayerNorm: on any axis, with or without bias, saved, loaded."""

import tempfile

import torch
from torch import Tensor, nn

import dynorm


class Mixer(nn.Module):
    """Images in, classes out: channels first in the stem, channels last in the head."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        # As nn.LayerNorm(32), for the last axis; with a constant for each channel; without a bias,
        # as an RMSNorm.
        self.tokens = nn.LayerNorm(32) if norm else dynorm.DyISRU(32)
        self.head_norm = (
            nn.RMSNorm(32) if norm else dynorm.DyT(32, bias=False, per_channel=True, scale=32**0.5)
        )
        # Channels at axis 1, for which nn.LayerNorm needs a permutation.
        self.stem_norm = dynorm.DyISRU(32, dim=1, center=True)
        self.stem, self.mix, self.head = (
            nn.Conv2d(3, 32, 4, stride=4),
            nn.Linear(32, 32),
            nn.Linear(32, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (B, 10)."""
        x = self.stem_norm(self.stem(images)).flatten(2).transpose(1, 2)
        x = x + self.mix(self.tokens(x)).relu()
        return self.head(self.head_norm(x).mean(1))


def main() -> None:
    """Train on random images with a rule, save, load."""
    torch.manual_seed(0)
    model = Mixer(norm=False)
    print(model)
    images = torch.randn(256, 3, 16, 16) + torch.randn(256, 3, 1, 1)
    labels = 3 * (images[:, 0].mean((1, 2)) > 0) + images.mean((2, 3)).argmax(1)

    # The constants by theory, from the layers' inputs. Then they learn, with a rate of their own.
    dynorm.init_from_batch_(model, images)
    optimizer = torch.optim.AdamW(
        dynorm.param_groups(model, lr=1e-2, weight_decay=0.01, constants_lr=3e-2)
    )
    for _ in range(80):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    accuracy = (model(images).argmax(-1) == labels).float().mean().item()
    print(
        f"loss {loss:.3f}, accuracy {accuracy:.3f}, beta of the tokens' layer "
        f"{model.tokens.beta().item():.1f}"
    )

    # torch's own state dict works: the parameters are ordinary ones.
    twin = Mixer(norm=False)
    twin.load_state_dict(model.state_dict())
    # dynorm.save writes no pickle; dynorm.load puts the layers into a model of the class that still
    # has norms.
    with tempfile.TemporaryDirectory() as parent:
        dynorm.save(model, f"{parent}/mixer")
        loaded = dynorm.load(f"{parent}/mixer", Mixer(norm=True))
    if not accuracy > 0.8:
        raise SystemExit("the model should have learned the rule")
    torch.testing.assert_close(twin(images), model(images), rtol=0, atol=0)
    torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)
    print(f"loaded: {loaded.head_norm}")


if __name__ == "__main__":
    main()
