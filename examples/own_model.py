"""Use the layers in a model of your own, like nn.LayerNorm: on any axis, with or without bias, saved, loaded."""

import tempfile

import torch
from torch import Tensor, nn

import dynorm


class Mixer(nn.Module):
    """An image classifier, with channels first in the stem and channels last in the head."""

    def __init__(self, *, norms: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        # Channels on axis 1, for which nn.LayerNorm needs a permutation.
        self.stem_norm = dynorm.DyISRU(32, dim=1, center=True)
        # Like nn.LayerNorm(32), on the last axis.
        self.token_norm = nn.LayerNorm(32) if norms else dynorm.DyISRU(32)
        self.mix = nn.Linear(32, 32)
        if norms:
            self.head_norm = nn.RMSNorm(32)
        else:
            # Without a bias, like nn.RMSNorm, and with one constant per channel.
            self.head_norm = dynorm.DyT(32, bias=False, per_channel=True, scale=32**0.5)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (B, 10)."""
        x = self.stem_norm(self.stem(images))
        x = x.flatten(2).transpose(1, 2)
        x = x + self.mix(self.token_norm(x)).relu()
        x = self.head_norm(x).mean(1)
        return self.head(x)


def random_images() -> tuple[Tensor, Tensor]:
    """Return random images, and labels that follow from their mean colours."""
    noise = torch.randn(256, 3, 16, 16)
    colours = torch.randn(256, 3, 1, 1)
    images = noise + colours
    first_channel_is_bright = images[:, 0].mean((1, 2)) > 0
    brightest_channel = images.mean((2, 3)).argmax(1)
    return images, 3 * first_channel_is_bright + brightest_channel


def train(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Train the model, and return its last loss."""
    # Theory sets the constants, from the layers' inputs. Then they learn, with a rate of their own.
    dynorm.init_from_batch_(model, images)
    groups = dynorm.param_groups(model, lr=1e-2, weight_decay=0.01, constants_lr=3e-2)
    optimizer = torch.optim.AdamW(groups)
    for _ in range(80):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    """Train, save, load."""
    torch.manual_seed(0)
    model = Mixer(norms=False)
    print(model)
    images, labels = random_images()
    loss = train(model, images, labels)
    logits = model(images)
    accuracy = (logits.argmax(-1) == labels).float().mean().item()
    beta = model.token_norm.beta().item()
    print(f"loss {loss:.3f}, accuracy {accuracy:.3f}, beta of the tokens' layer {beta:.1f}")
    if not accuracy > 0.8:
        raise SystemExit("the model should have learned the rule")

    # torch's own state dict works, because the constants are ordinary parameters.
    copied = Mixer(norms=False)
    copied.load_state_dict(model.state_dict())
    torch.testing.assert_close(copied(images), logits, rtol=0, atol=0)

    # dynorm.save writes no pickle. dynorm.load puts the layers into a model that still has norms.
    with tempfile.TemporaryDirectory() as parent:
        dynorm.save(model, f"{parent}/mixer")
        loaded = dynorm.load(f"{parent}/mixer", Mixer(norms=True))
    torch.testing.assert_close(loaded(images), logits, rtol=0, atol=0)
    print(f"loaded: {loaded.head_norm}")


if __name__ == "__main__":
    main()
