"""What a method asks of a vision encoder, and what an encoder can give."""

from dataclasses import dataclass, fields

from msdg_vllm.core.profiles import EncoderProfile

STATES_OF_TOKEN_SIGNALS = 4
"""What the signals of tokens take at most, in states: two that are held, directions, groups."""

HIDDEN = "the inside of the vision encoder, and of this model only projected tokens are known"
"""What methods that read states, attention or a profile lack where `shows_states` is False."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """What a method may know of a vision encoder before it runs.

    Layers count from 0. Layer `l` reads state `l`; what the last layer puts out, state
    `num_layers`, goes to the projector (of a 24-layer CLIP tower LLaVA runs 23 layers).

    Attributes:
        num_layers: Layers that run.
        profile: Sinks, windows and directions of this encoder; None when nobody measured them.
        has_class_token: Whether a class token looks at all patches.
        global_layers: Layers whose attention spans the whole image; None means all of them.
        patches_per_token: How many neighbouring patches merge into one visual token.
        num_levels: Further embeddings that a token carries for later layers of the decoder.
        shows_states: Whether what happens inside it is known; if not, only projected tokens are.
        free_resolution: Whether it takes an image at any size, with more tokens for a larger one.
    """

    num_layers: int
    profile: EncoderProfile | None
    has_class_token: bool = True
    global_layers: tuple[int, ...] | None = None
    patches_per_token: int = 1
    num_levels: int = 0
    shows_states: bool = True
    free_resolution: bool = False

    @property
    def measured(self) -> EncoderProfile:
        """The profile, for methods that read it: without one they are not asked."""
        assert self.profile is not None
        return self.profile

    @property
    def last_layer(self) -> int:
        """The layer whose output goes to the projector."""
        return self.num_layers - 1

    def global_layer_near(self, depth: float) -> int:
        """Return the layer with global attention nearest to a depth, 0 first and 1 last.

        So a layer that a paper names for one encoder can be found in another. Of two that are
        as near, the earlier one.
        """
        layers = self.global_layers or range(self.num_layers)
        return min(layers, key=lambda layer: (abs(layer - depth * self.last_layer), layer))


@dataclass(frozen=True, slots=True)
class Needs:
    """What a method reads; whatever is not named here is not computed for it.

    Attributes:
        states: Layers whose input states are read; `Encoder.num_layers` is the output.
        token_signals: Layers of which the signals of tokens by the encoder's profile are read; an
            engine that reduces no states on the way hands over these states.
        features: Whether what is handed to the projector is read.
        class_attention: Layers of which the attention row of the class token is read.
        received_attention: Layers of which the attention that each patch receives is read; their
            attention must be global.
        keys: Layers of which the keys, averaged over heads, are read.
        mlp_updates: Layers of which the norm of the MLP's update is read.
        visual: Whether the projected tokens are read, with or without a query.
        query: Whether the query is read, and, when there is one, the projected tokens.
        seed: Whether a number that identifies the image's content is read.
        merging: Whether new tokens are made of several.
        scaling: Whether the image is scaled down before it is encoded.
    """

    states: tuple[int, ...] = ()
    token_signals: tuple[int, ...] = ()
    features: bool = False
    class_attention: tuple[int, ...] = ()
    received_attention: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    mlp_updates: tuple[int, ...] = ()
    visual: bool = False
    query: bool = False
    seed: bool = False
    merging: bool = False
    scaling: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        """Return what two methods need together."""

        def union(name: str) -> bool | tuple[int, ...]:
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, bool):
                return ours or bool(theirs)
            return tuple(sorted({*ours, *theirs}))

        return Needs(**{field.name: union(field.name) for field in fields(self)})  # type: ignore[arg-type]

    @property
    def reads_encoder(self) -> bool:
        """Whether anything of the encoder is read but the projected tokens."""
        layers = (*self.states, *self.token_signals, *self.attention_layers, *self.mlp_updates)
        return self.features or bool(layers)

    @property
    def num_held_states(self) -> int:
        """How many states' worth of memory an engine that reduces states on the way may need."""
        return len(self.states) + (STATES_OF_TOKEN_SIGNALS if self.token_signals else 0)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose queries and keys must be computed again from their input."""
        return tuple(sorted({*self.class_attention, *self.received_attention, *self.keys}))


def unmet_need(needs: Needs, encoder: Encoder) -> str | None:
    """Say what an encoder cannot give to a method; None when it can give all."""
    if needs.reads_encoder and not encoder.shows_states:
        return HIDDEN
    if needs.scaling and not encoder.free_resolution:
        return "images at any size, and this vision encoder takes them at one (try 'pool')"
    if needs.merging and encoder.num_levels:
        return (
            "only a token's embedding when it merges tokens, and those of this model carry "
            f"{encoder.num_levels} more for later layers"
        )
    if needs.class_attention and not encoder.has_class_token:
        return "the attention of a class token, and this vision encoder has none"
    if windowed := set(needs.received_attention) - set(
        encoder.global_layers or needs.received_attention
    ):
        return (
            f"the attention of layer {min(windowed)} across the whole image, and in this vision "
            f"encoder only layers {', '.join(map(str, encoder.global_layers or ()))} have it"
        )
    layers = {*needs.attention_layers, *needs.mlp_updates}
    states = {n for n in (*needs.states, *needs.token_signals) if n > encoder.num_layers}
    if beyond := sorted({layer for layer in layers if layer >= encoder.num_layers} | states):
        return f"layer {beyond[-1]}, and this vision encoder runs {encoder.num_layers} layers"
    return None
