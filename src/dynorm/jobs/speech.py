"""Models of audio: their inputs, their transcripts, and how many words of these differ."""

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dynorm.batches import copied_tensors
from dynorm.jobs.audio import Clip
from dynorm.jobs.checkpoint import Pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Listener:
    """Turns audio files into a model's inputs. A decoder gets the original's greedy transcripts.

    Each file is transcribed once, when it is first needed.
    """

    def __init__(self, pretrained: Pretrained, original: "PreTrainedModel") -> None:
        self.processor = pretrained.tokenizer
        self.original = original
        self.tokenizer = getattr(self.processor, "tokenizer", None)
        self.extractor = getattr(self.processor, "feature_extractor", self.processor)
        self.rate: int = self.extractor.sampling_rate
        self.has_decoder = "decoder_input_ids" in inspect.signature(original.forward).parameters
        self._written: dict[Clip, list[int]] = {}

    def batch(self, clips: Sequence[Clip]) -> dict[str, Tensor]:
        """Return the model's inputs. If it has no fixed window, cut all to the shortest clip."""
        sounds = [clip.read(self.rate) for clip in clips]
        length = getattr(self.extractor, "n_samples", min(map(len, sounds)))
        features = self.extractor(
            [sound[:length].numpy() for sound in sounds],
            sampling_rate=self.rate,
            return_tensors="pt",
        )
        takes = self.original.main_input_name
        batch = {takes: features[takes].to(self.original.dtype)}
        if not self.has_decoder:
            return batch
        if not set(clips) <= self._written.keys():
            written = self.write(self.original, batch)
            self._written |= dict(zip(clips, written, strict=True))
        ids = [torch.tensor(self._written[clip], device="cpu") for clip in clips]
        masks = [torch.ones_like(tokens) for tokens in ids]
        batch["decoder_input_ids"] = pad_sequence(ids, batch_first=True)
        batch["decoder_attention_mask"] = pad_sequence(masks, batch_first=True)
        return batch

    @torch.no_grad()
    def write(self, model: "PreTrainedModel", batch: dict[str, Tensor]) -> list[list[int]]:
        """Return a model's greedy transcript of each sound; without tokenizer, its start token."""
        takes = model.main_input_name
        sounds = copied_tensors({takes: batch[takes].to(model.device)})
        if not self.has_decoder:
            likeliest: list[list[int]] = model(**sounds).logits.argmax(-1).tolist()
            return likeliest
        if self.tokenizer is None:
            return [[model.config.decoder_start_token_id]] * len(batch[takes])
        options: dict[str, object] = {
            "do_sample": False,
            "num_beams": 1,
            "num_return_sequences": 1,
            "return_dict_in_generate": True,
        }
        # Without this, Whisper starts again after a timestamp, and returns only sounds that have
        # one.
        if "force_unique_generate_call" in inspect.signature(model.generate).parameters:
            options["force_unique_generate_call"] = True
        transcripts: list[list[int]] = model.generate(**sounds, **options).sequences.tolist()
        # Drop the end token and the padding.
        endings = (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        for ids in transcripts:
            while len(ids) > 1 and ids[-1] in endings:
                ids.pop()
        return transcripts

    def text(self, ids: list[int]) -> str:
        """Decode the tokens of a transcript."""
        return str(self.processor.decode(ids, skip_special_tokens=True)).strip()


def word_errors(transcript: str, reference: str) -> tuple[int, int]:
    """Return the word errors of a transcript, and the number of words of the reference.

    The errors are the fewest words to insert, delete or replace; case does not count.
    """
    words = re.findall(r"[\w']+", transcript.lower())
    correct = re.findall(r"[\w']+", reference.lower())
    # row[j]: the distance of the words so far from the first j correct ones.
    row = list(range(len(correct) + 1))
    for count, word in enumerate(words, start=1):
        before = row
        row = [count]
        for j, other in enumerate(correct):
            if word == other:
                row.append(before[j])
            else:
                row.append(1 + min(before[j], before[j + 1], row[j]))
    return row[-1], len(correct)
