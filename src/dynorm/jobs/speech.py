"""Models of audio: what they hear, what they write down of it, and how many words of two transcripts differ."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dynorm.batches import copied_tensors
from dynorm.jobs.audio import Clip
from dynorm.jobs.checkpoint import Pretrained


class Listener:
    """Turns audio files into a model's inputs. A decoder is given what the original writes down of them, greedily.

    Each file is written down once, when it is first needed.
    """

    def __init__(self, pretrained: Pretrained, original: Any) -> None:
        self.processor, self.original = pretrained.tokenizer, original
        self.tokenizer = getattr(self.processor, "tokenizer", None)
        self.extractor = getattr(self.processor, "feature_extractor", self.processor)
        self.rate: int = self.extractor.sampling_rate
        self.has_decoder = "decoder_input_ids" in inspect.signature(original.forward).parameters
        self._written: dict[Clip, list[int]] = {}

    def batch(self, clips: Sequence[Clip]) -> dict[str, Tensor]:
        """Return what the model takes; where it has no window to fill, all are cut to the shortest."""
        sounds = [clip.read(self.rate) for clip in clips]
        length = getattr(self.extractor, "n_samples", min(map(len, sounds)))
        heard = self.extractor(
            [each[:length].numpy() for each in sounds], sampling_rate=self.rate, return_tensors="pt"
        )
        batch = {
            self.original.main_input_name: heard[self.original.main_input_name].to(
                self.original.dtype
            )
        }
        if not self.has_decoder:
            return batch
        if not set(clips) <= self._written.keys():
            self._written |= dict(zip(clips, self.write(self.original, batch), strict=True))
        ids = [torch.tensor(self._written[clip], device="cpu") for clip in clips]
        mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
        return batch | {
            "decoder_input_ids": pad_sequence(ids, batch_first=True),
            "decoder_attention_mask": mask,
        }

    @torch.no_grad()
    def write(self, model: Any, batch: dict[str, Tensor]) -> list[list[int]]:
        """Return the likeliest tokens that a model writes down of each sound; without a tokenizer, where it starts."""
        heard = batch[model.main_input_name].to(model.device)
        sound = copied_tensors({model.main_input_name: heard})
        if not self.has_decoder:
            likeliest: list[list[int]] = model(**sound).logits.argmax(-1).tolist()
            return likeliest
        if self.tokenizer is None:
            return [[model.config.decoder_start_token_id]] * len(batch[model.main_input_name])
        options = {
            "do_sample": False,
            "num_beams": 1,
            "num_return_sequences": 1,
            "return_dict_in_generate": True,
        }
        # Else Whisper begins anew after a mark of time, and returns only the sounds that have one.
        if "force_unique_generate_call" in inspect.signature(model.generate).parameters:
            options["force_unique_generate_call"] = True
        found: list[list[int]] = model.generate(**sound, **options).sequences.tolist()
        for ids in found:
            # The end, and what pads it.
            while len(ids) > 1 and ids[-1] in (
                self.tokenizer.eos_token_id,
                self.tokenizer.pad_token_id,
            ):
                ids.pop()
        return found

    def text(self, ids: list[int]) -> str:
        """Return the transcript of its tokens."""
        return str(self.processor.decode(ids, skip_special_tokens=True)).strip()


def word_errors(found: str, wanted: str) -> tuple[int, int]:
    """Return how many words, whatever their case, must be put in, left out or exchanged, and how many are wanted."""
    first, second = (re.findall(r"[\w']+", text.lower()) for text in (found, wanted))
    row = list(range(len(second) + 1))
    for i, word in enumerate(first, start=1):
        before, row = row, [i]
        for j, other in enumerate(second):
            row.append(min(before[j] + (word != other), before[j + 1] + 1, row[j] + 1))
    return row[-1], len(second)
