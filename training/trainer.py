"""One step of each stage: the model, its training-only symbols, and their losses."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.quality.questions import FINE_KINDS, KINDS
from benchmarks.quality.scenes import MAX_ITEMS
from training.families import FAMILIES, Form
from training.lessons import (
    firsts_loss,
    foreseen_options,
    judged_options,
    read_choices,
    whereabouts_loss,
)
from training.packing import (
    IGNORED,
    PackedQuestions,
    choose_glimpse,
    choose_patches,
    pack_questions,
    packed_mask,
    sample_arrays,
)
from training.pool import BACKGROUND, Pool
from training.stages import STAGES, Stage
from training.symbols import (
    Symbols,
    alignment_loss,
    spelling_loss,
    summary_loss,
    update_size,
)

# How many of the 144 patches there are while it is learnt what items look like: all that show
# anything, and some background. It costs a quarter.
_GLIMPSE = 44
# The same for pictures of any size: what shows anything in the fullest, and this many more.
_MORE = 20
# Quarters of a token that a character must be wide to be spelled, and for tokens to have owners.
_SHARP, _CLEAR = 3, 2
_USUAL_TOKENS = 168  # of the largest pictures whose batches are whole
# Layers after the early ones shall change only what they must.
_UPDATE_COST = 0.005

# There are more options than answers; they shall not drown them.
_OPTIONS_WEIGHT = 0.3


class Trainer:
    """The model, its training-only symbols, and one step of each stage."""

    def __init__(self, name: str, pool: Pool, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.pool = pool
        self.family = family = FAMILIES[name]
        self.tokenizer = family.tokenizer()
        self.model: Any = family.build(self.tokenizer)
        embeddings = self.model.get_input_embeddings()
        self.symbols = Symbols(self.tokenizer, embeddings, family.state_width)
        with torch.no_grad():
            self.model.lm_head.weight.copy_(self.symbols.words)
        self.opening, self.closing = (
            torch.tensor(self.tokenizer(text).input_ids, dtype=torch.long)
            for text in (family.opening, family.closing)
        )
        family.start(self.model, self.symbols, self.opening)

    def optimizer(self, stage: Stage) -> torch.optim.AdamW:
        core = self.model.model
        language = [*core.language_model.parameters(), *self.model.lm_head.parameters()]
        parts = self.family.vision_parts(self.model)
        vision = [parameter for part in parts for parameter in part.parameters()]
        readers = [*self.symbols.spelling.parameters(), *self.symbols.summary.parameters()]
        if stage.name in ("words", "grid"):
            taught = {id(parameter) for parameter in readers}
            language += [p for p in self.symbols.parameters() if id(p) not in taught]
        else:
            vision += readers
        groups = [(language, stage.language_rate), (vision, stage.vision_rate)]
        for parameters, rate in groups:
            for parameter in parameters:
                parameter.requires_grad_(rate > 0)
        return torch.optim.AdamW(
            [{"params": p, "lr": rate, "peak": rate} for p, rate in groups if rate > 0],
            betas=(0.9, 0.98),
            weight_decay=0.02,
        )

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        number = [s.name for s in STAGES].index(stage.name)
        rng = np.random.default_rng([self.seed, number, step])
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
        scenes = self.family.choose_scenes(self.pool, stage.batch, rng)
        while stage.name in ("grid", "align", "spell") and self.pool.sharpness[scenes[0]] < _SHARP:
            scenes = self.family.choose_scenes(self.pool, stage.batch, rng)
        form = self._form(scenes)
        num_patches = form[0] * form[1]
        glimpsed = stage.name in ("grid", "align", "spell", "glimpses")
        if not glimpsed:
            # Pictures larger than usual come in fewer at once.
            scenes = scenes[: max(2, stage.batch * _USUAL_TOKENS // num_patches)]
        batch = sample_arrays(self.pool, scenes)
        batch["owner"] = batch["owner"][:, :num_patches]
        patches = torch.arange(num_patches).expand(len(scenes), -1)
        seen = None
        if glimpsed:
            num_seen = self._num_seen(batch["owner"])
            patches = seen = choose_glimpse(batch["owner"], num_seen, generator)
            batch["owner"] = batch["owner"].gather(1, seen)
        offsets = self.family.offsets(batch["centers"], patches, form)
        if offsets is not None:
            mine = batch["owner"].clamp(min=0)[:, :, None, None].expand(-1, -1, -1, 2)
            batch["offsets"] = offsets.gather(2, mine).squeeze(2)
        alignment = torch.zeros(())
        if stage.name in ("words", "grid"):
            tokens = self._symbolic_tokens(batch, generator)
        else:
            early = stage.name == "align"
            with torch.set_grad_enabled(stage.vision_rate > 0):
                seeing = self.family.encode(self.model, self.pool.pixels[scenes], seen, form, early)
            tokens, states = seeing.tokens, seeing.states
        sharpness = self.pool.sharpness[scenes[0]]
        # What a picture that is scaled down to a third shows is for the answers to find out.
        if stage.vision_rate > 0 and sharpness >= _CLEAR:
            alignment = alignment_loss(self.symbols, tokens, batch)
            if sharpness >= _SHARP:
                columns = (patches % form[1] + 0.5) / form[1]
                spelled = states[self.family.spelling_layer]
                alignment = alignment + spelling_loss(self.symbols, spelled, columns, batch)
            if stage.name != "align":
                if seeing.summary is not None:
                    alignment = alignment + summary_loss(self.symbols, seeing.summary, batch)
                late = states[self.family.early_layers - 1 :]
                alignment = alignment + _UPDATE_COST * update_size(late)
            if stage.name in ("align", "spell"):
                return alignment, {}
        max_items = self.pool.colors.shape[1]
        if stage.name == "words":
            kept = choose_patches(batch["owner"], 12, generator, True, max_items)
        else:
            # Some of the time all tokens, else any number down to 1/12 of the picture's.
            num_kept = num_tokens = tokens.shape[1]
            if rng.random() < (0.85 if stage.name == "gaps" else 2 / 3):
                least = num_patches / 12
                num_kept = max(1, int(num_tokens * (least / num_tokens) ** rng.random()))
            kept = choose_patches(batch["owner"], num_kept, generator, max_items=max_items)
        tokens = tokens.gather(1, kept.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        batch["owner"] = batch["owner"].gather(1, kept)
        positions = self.family.positions(patches.gather(1, kept), form)
        answer, correct = self.answer_loss(tokens, *positions, scenes, batch, stage, rng)
        return answer + alignment, correct

    def _symbolic_tokens(self, batch: dict[str, Tensor], generator: torch.Generator) -> Tensor:
        tokens = self.symbols.visual_tokens(batch)
        noise = torch.randn(tokens.shape, generator=generator)
        scale: float = 0.3 / tokens.shape[-1] ** 0.5
        return tokens + noise * scale

    def _num_seen(self, owner: Tensor) -> int:
        """Return how many tokens of each picture a glimpse has."""
        if self.pool.colors.shape[1] == MAX_ITEMS:
            return _GLIMPSE
        shown = int((owner != BACKGROUND).sum(1).max())
        return min(owner.shape[1], shown + _MORE)

    def _form(self, scenes: np.ndarray) -> Form:
        """Return the form of pictures that all have the same."""
        if self.pool.forms is None:
            return self.family.canvas.form(1, 1)
        rows, columns = self.pool.forms[scenes[0]]
        return int(rows), int(columns)

    def answer_loss(
        self,
        visual: Tensor,
        before: Tensor,
        start: int,
        scenes: np.ndarray,
        batch: dict[str, Tensor],
        stage: Stage,
        rng: np.random.Generator,
    ) -> tuple[Tensor, dict[str, float]]:
        packed = pack_questions(self.pool, scenes, rng, stage.num_questions)
        embed = self.model.get_input_embeddings()
        opening, closing = (
            embed(tokens).expand(len(scenes), -1, -1) for tokens in (self.opening, self.closing)
        )
        inputs = torch.cat([opening, visual, closing, embed(packed.tokens)], dim=1)
        num_before = before.shape[-1]
        after = (start + packed.offset).expand(*before.shape[:-2], -1, -1)
        output = self.model.model.language_model(
            inputs_embeds=inputs,
            attention_mask=packed_mask(packed.segment, num_before),
            position_ids=torch.cat([before, after], dim=-1),
            use_cache=False,
            output_hidden_states=True,
        )
        hidden = output.last_hidden_state[:, num_before:]
        wanted = packed.labels != IGNORED
        logits = self.model.lm_head(hidden[wanted])
        labels = packed.labels[wanted]
        # The end of the answer is soon certain; accuracy is of what comes before it.
        told = labels != self.tokenizer.eos_token_id
        right = (logits.argmax(-1) == labels)[told].float()
        kinds = packed.kinds[wanted][told]
        correct = {
            name: float(right[kinds == kind].mean())
            for kind, name in enumerate(FINE_KINDS)
            if (kinds == kind).any()
        }
        losses = functional.cross_entropy(logits, labels, reduction="none")
        counting = packed.kinds[wanted] == KINDS.index("counting")
        weights = torch.where(counting, self.family.counting_weight, 1.0)
        loss = (losses * weights).sum() / weights.sum()
        states = output.hidden_states
        if stage.name in ("words", "grid"):
            whereabouts = whereabouts_loss(self.symbols, states[2][:, num_before:], packed, batch)
            loss, correct["where"] = loss + whereabouts, whereabouts.item()
        if self.family.taught_half_way:
            shown = states[2][:, len(self.opening) :][:, : visual.shape[1]]
            firsts, correct["firsts"] = firsts_loss(self.symbols, shown, batch["owner"])
            options, learnt = self._options_loss([s[:, num_before:] for s in states], packed)
            loss = loss + firsts + options
            correct |= learnt
        return loss, correct

    def _options_loss(
        self, states: list[Tensor], packed: PackedQuestions
    ) -> tuple[Tensor, dict[str, float]]:
        """How badly the answer to a choice is foreseen, and each option judged.

        Args:
            states: Of the packed text, entering each layer, `(B, T, D)`.
            packed: The questions.
        """
        choices = read_choices(packed, self.tokenizer)
        lessons = {
            "foreseen": (states[2], foreseen_options(choices, packed)),
            "judged": (states[3], judged_options(choices, self.tokenizer)),
        }
        loss, correct = torch.zeros(()), {}
        for name, (state, (rows, columns, words)) in lessons.items():
            if len(words):
                final = self.model.model.language_model.norm(state[rows, columns])
                said = self.model.lm_head(final)
                correct[name] = (said.argmax(-1) == words).float().mean().item()
                loss = loss + _OPTIONS_WEIGHT * functional.cross_entropy(said, words)
        return loss, correct
