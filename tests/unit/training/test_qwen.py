"""What training does with the Qwen2.5-VL style model is what stock transformers does with it."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.questions import ask_one_of_each
from benchmarks.quality.scenes import sample_scene
from training.export import export
from training.families import FAMILIES
from training.pool import patch_owners, question_tokens
from training.qwen import CANVAS, encode_tokens
from training.symbols import Symbols
from training.tokenizer import QWEN_TOKENS, build_tokenizer

QWEN = FAMILIES["qwen"]
SIZES = ((96, 96), (104, 96), (88, 112), (96, 112))  # width, height: taken as they are


@pytest.fixture(scope="module")
def tokenizer():
    return QWEN.tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = QWEN.build(tokenizer).eval()
    for block in model.model.visual.blocks[QWEN.early_layers :]:
        torch.nn.init.normal_(block.attn.proj.weight, 0, 0.1)
        torch.nn.init.normal_(block.mlp.down_proj.weight, 0, 0.1)
    return model


@pytest.fixture(scope="module")
def processor(tokenizer):
    return QWEN.processor(tokenizer)


def picture(width: int, height: int) -> Image.Image:
    return draw_scene(sample_scene(3)).resize((width, height))


def stored(*pictures: Image.Image) -> np.ndarray:
    return np.stack([CANVAS.arrange(one) for one in pictures])


@torch.inference_mode()
@pytest.mark.parametrize("size", SIZES)
def test_training_encodes_pictures_as_the_model_itself_does(model, processor, size):
    form = CANVAS.form(*size)
    pictures = [picture(*size), picture(*size).rotate(180)]
    inputs = processor.image_processor(pictures, return_tensors="pt")
    expected = model.model.visual(inputs.pixel_values, grid_thw=inputs.image_grid_thw)
    seen = QWEN.encode(model, stored(*pictures), None, form, early=False)
    torch.testing.assert_close(seen.tokens.flatten(0, 1), expected.pooler_output)


@torch.inference_mode()
def test_a_glimpse_of_whole_windows_looks_as_in_the_whole_picture(model):
    """The first two layers attend within windows alone."""
    form = CANVAS.form(112, 96)
    numbers = torch.arange(form[0] * form[1])
    windows = numbers // form[1] // 4 * 10 + numbers % form[1] // 4
    seen = numbers[(windows == 1) | (windows == 13) | (windows == 22)].unsqueeze(0)
    pixels = torch.randn(1, len(numbers), 192)
    _, whole = encode_tokens(model, pixels, numbers.unsqueeze(0), form, 2)
    _, glimpse = encode_tokens(model, pixels[:, seen[0]], seen, form, 2)
    torch.testing.assert_close(glimpse[1][0], whole[1][0, seen[0]])


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_stored_in_the_order_of_the_processor(processor, size):
    values = processor.image_processor(picture(*size), return_tensors="pt").pixel_values
    values = values.view(-1, 4, 3, 2, 4, 4)  # token, patch, channel, frame, row, column
    mean, std = (
        torch.tensor(getattr(processor.image_processor, name)).view(3, 1, 1)
        for name in ("image_mean", "image_std")
    )
    pixels = torch.from_numpy(stored(picture(*size))).view(-1, 4, 3, 4, 4)
    for frame in range(2):
        torch.testing.assert_close(values[:, :, :, frame], (pixels / 255 - mean) / std)


@torch.inference_mode()
@pytest.mark.parametrize("size", SIZES)
def test_training_answers_as_the_model_itself_does(model, processor, tokenizer, size):
    """Positions included: of text before, between rows and columns, and after the picture."""
    form = CANVAS.form(*size)
    question = ask_one_of_each(sample_scene(3))[0]
    parts = [{"type": "image"}, {"type": "text", "text": question.text}]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    inputs = processor(images=picture(*size), text=chat, return_tensors="pt")
    expected = model(**inputs).logits[0, -1]
    tokens, length = question_tokens(tokenizer, question.text, question.answer)
    visual = QWEN.encode(model, stored(picture(*size)), None, form, early=False).tokens
    patches = torch.arange(form[0] * form[1]).unsqueeze(0)
    before, start = QWEN.positions(patches, form)
    embed = model.get_input_embeddings()
    opening, closing, asked = (
        embed(torch.tensor([ids]))
        for ids in (
            tokenizer(QWEN.opening).input_ids,
            tokenizer(QWEN.closing).input_ids,
            tokens[:length],
        )
    )
    after = (start + torch.arange(length)).expand(3, 1, -1)
    hidden = model.model.language_model(
        inputs_embeds=torch.cat([opening, visual, closing, asked], 1),
        position_ids=torch.cat([before, after], -1),
    ).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden[0, -1]), expected, atol=1e-4, rtol=1e-4)


def test_tokens_that_are_kept_keep_their_positions():
    form = (11, 14)
    every, start = QWEN.positions(torch.arange(154).unsqueeze(0), form)
    kept = torch.tensor([[0, 13, 14, 100, 153]])
    some, start_of_some = QWEN.positions(kept, form)
    assert start_of_some == start
    assert (some[..., 2:-1] == every[..., 2:-1][..., kept[0]]).all()
    assert (some[..., -1] == every[..., -1]).all()


@torch.inference_mode()
def test_the_language_model_starts_with_a_sense_of_rows_and_columns(tokenizer):
    torch.manual_seed(0)
    model = QWEN.build(tokenizer)
    symbols = Symbols(tokenizer, model.get_input_embeddings(), QWEN.state_width)
    opening = torch.tensor(tokenizer(QWEN.opening).input_ids)
    QWEN.start(model, symbols, opening)
    patches = torch.arange(144).unsqueeze(0)
    before, _ = QWEN.positions(patches, (12, 12))
    visual = torch.randn(1, 144, 128) / 128**0.5
    inputs = torch.cat([model.get_input_embeddings()(opening).unsqueeze(0), visual], 1)
    language = model.model.language_model
    layer = language.layers[0]
    told, _ = layer.self_attn(
        layer.input_layernorm(inputs),
        position_embeddings=language.rotary_emb(inputs, before[..., :-1]),
    )
    directions = symbols.place_directions
    read = (told[0, 2:] @ directions / directions.square().sum(0)).view(12, 12, 2)
    for axis, (along, across) in enumerate(((1, 0), (0, 1))):
        steps = read[..., axis].mean(across).diff()
        assert (steps > 0.2).all()
        # What else the tokens hold blurs it a little.
        assert read[..., axis].std(across).mean() < 0.2 * read[..., axis].std(along).mean()


def test_both_tokenizers_agree_on_everything_but_the_marks(tokenizer):
    ours, other = tokenizer.get_vocab(), build_tokenizer().get_vocab()
    assert len(ours) == len(other)
    assert set(ours) - set(other) == set(QWEN_TOKENS)
    assert all(ours[token] == other[token] for token in ours.keys() & other.keys())


def test_offsets_lead_from_each_patch_to_its_item():
    scene = sample_scene(12)
    rows, columns = CANVAS.form(scene.width, scene.height)
    owner = torch.from_numpy(patch_owners(scene, rows, columns)).long()
    centers = torch.tensor([[[item.x, item.y] for item in scene.items]])
    patches = torch.arange(rows * columns).unsqueeze(0)
    offsets = QWEN.offsets(centers, patches, (rows, columns))
    assert offsets is not None
    for patch in (owner >= 0).nonzero().flatten().tolist():
        item = scene.items[int(owner[patch])]
        right, down = offsets[0, patch, int(owner[patch])].tolist()
        assert (patch % columns + 0.5 + right) / columns == pytest.approx(item.x, abs=1e-5)
        assert (patch // columns + 0.5 + down) / rows == pytest.approx(item.y, abs=1e-5)


@torch.inference_mode()
def test_an_export_is_what_stock_classes_load(model, tmp_path):
    picture = draw_scene(sample_scene(5))
    export(QWEN, copy.deepcopy(model), tmp_path)
    loaded, loading = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys"))
    processor = AutoProcessor.from_pretrained(tmp_path)
    parts = [{"type": "image"}, {"type": "text", "text": "Is there a sign?"}]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    assert chat == f"{QWEN.opening}<|image_pad|>{QWEN.closing}\nIs there a sign?\nASSISTANT:\n"
    inputs = processor(images=picture, text=chat, return_tensors="pt")
    rows, columns = CANVAS.form(*picture.size)
    assert (inputs.input_ids == loaded.config.image_token_id).sum() == rows * columns
    said = loaded.eval()(**inputs).logits[0, -1]
    torch.testing.assert_close(said, model(**inputs).logits[0, -1], atol=0.05, rtol=0.05)
