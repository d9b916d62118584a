"""Attention without history: projections around an op, for every score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from attnfast._utils.checks import (
    check_array,
    check_choice,
    check_flag,
    check_int,
    check_like,
    check_tensor,
    describe,
    raise_type_error,
    raise_value_error,
    shape_of,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.decoding import Memory, attend, check_memory, prepare
from attnfast.nn._linear import project
from attnfast.nn.positions import RelativePositions
from attnfast.ops.arguments import apply_temperature, check_activation, check_temperature
from attnfast.ops.attention import NORMALISATIONS
from attnfast.ops.backends import check_backend
from attnfast.ops.operators import accumulation_dtype
from attnfast.ops.span import check_form
from attnfast.outputs import AttentionOutput
from attnfast.spans import Position, Span


def check_sizes(**sizes: Any) -> None:
    """Raise unless the sizes of a module are integers of at least 1."""
    for name, size in sizes.items():
        check_int(name, size)


def check_target_mask(
    mask: Any, rows: Sequence[int], like: Tensor | None = None, of: str = "state"
) -> None:
    """Raise unless the mask has one boolean for each row, False for padding."""
    if mask is not None:
        check_array("target_mask", mask, "boolean", rows, like=like, of=of)


def refuse_script(module: nn.Module) -> NoReturn:
    """Raise in place of the errors of ``torch.jit.script``, which calls this first.

    Assign it to ``__prepare_scriptable__`` of a class.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"torch.jit.script does not support {type(module).__name__}: use torch.export.export"
    )


class SpanTerms(TypedDict, total=False):
    """Arguments of :func:`attnfast.attend` that restrict rows to keys near their positions."""

    span: Span | None
    position: Position
    sigma: float | Tensor | None


class Terms(SpanTerms, total=False):
    """Terms that are added to the scores."""

    bias: Tensor | None


class _Attention(Module):
    """Projections around an op: additive with a score vector, dot product without one."""

    query_proj: nn.Module
    key_proj: nn.Module
    score_vector: nn.Parameter | None
    #: Divides the scores and the terms added to them.
    temperature: float = 1.0
    #: The activation of an additive score.
    activation = "tanh"
    #: The function that turns scores into weights.
    normalisation = "softmax"
    #: Whether calls take and return a history.
    has_history = False
    #: Whether the position of a key among the keys matters.
    knows_order = False
    __prepare_scriptable__ = refuse_script
    _sizes: tuple[str, ...] = ("query_dim", "key_dim", "attn_dim")
    _defaults: ClassVar[Mapping[str, Any]] = {
        "activation": "tanh", "normalisation": "softmax", "temperature": 1.0, "backend": None,
    }  # fmt: skip

    def __init__(
        self, weight_shape: tuple[int, ...] | None, scale: float | None, backend: str | None
    ):
        super().__init__()
        check_backend(backend)
        self.scale = scale
        self.backend = backend
        self.score_vector = None
        if weight_shape is not None:
            bound = weight_shape[-1] ** -0.5
            self.score_vector = nn.Parameter(torch.empty(weight_shape).uniform_(-bound, bound))

    def extra_repr(self) -> str:
        """Return the sizes, and the options that are not defaults."""
        return repr_fields(self, self._sizes, self._defaults)

    def prepare(
        self,
        states: Tensor,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Memory:
        """Project the keys of a source once.

        Args:
            states: encoder states ``[B, Tk, key_dim]``, the source of keys and values. Finite
                values in the padding are ignored; NaN in the padding reaches the gradient of the
                projection's weight, as in any ``nn.Linear``.
            lengths: ``[B]``, the number of states that are not padding.
            mask: boolean ``[B, Tk]``, True where a state may be attended to.
            values: ``[B, Tk, Dv]``, averaged into the contexts, separate from the keys (Miller et
                al., EMNLP 2016, arXiv:1606.03126); None uses the states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        try:
            return self._remember(*self._keys(states, values), lengths, mask)
        except Exception:
            self._check_states(states, values)
            raise

    def append(self, memory: Memory, states: Tensor, values: Tensor | None = None) -> Memory:
        """Project the keys of more states, and return the memory with them appended.

        Args:
            memory: from :meth:`prepare` or :meth:`append`; it is not modified.
            states: ``[B, key_dim]``, or ``[B, n, key_dim]`` for several.
            values: ``[B, (n,) Dv]``, separate from the keys as in :meth:`prepare`; None uses the
                states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_memory(memory)
        one = isinstance(states, Tensor) and states.dim() == 2
        if one:
            states = states.unsqueeze(1)
            values = values.unsqueeze(1) if isinstance(values, Tensor) else values
        try:
            return memory.append(*self._keys(states, values))
        except Exception:
            self._check_states(states, values)
            if values is None and self._wants_values(memory, states):
                raise_value_error(
                    "values", "given, because the memory's are separate from its states", None
                )
            if values is not None and values.shape[0] == memory.key.shape[0]:
                features = memory.value.shape[-1]
                raise_value_error(
                    "values", f"of {features} features, as the memory's", list(values.shape)
                )
            if states.shape[0] != memory.key.shape[0]:
                raise_value_error(
                    "states", f"of {memory.key.shape[0]} sequences, as the memory", states.shape[0]
                )
            raise

    def _wants_values(self, memory: Memory, states: Tensor) -> bool:
        """Return whether states cannot be used as the values of a memory."""
        features = getattr(getattr(self, "value_proj", None), "in_features", None)
        return states.shape[-1] != (features or memory.value.shape[-1])

    def _keys(self, states: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return projected keys, and values."""
        key = project(self.key_proj, states, self.backend)
        return key, states if values is None else values

    def _check_states(self, states: Any, values: Any = None) -> None:
        """Raise unless the source fits the module."""
        check_tensor("states", states)
        features = getattr(self.key_proj, "in_features", None)
        if states.dim() != 3 or features not in (None, states.shape[-1]):
            raise_value_error("states", f"[B, Tk, {features or 'key_dim'}]", list(states.shape))
        self._check_dtype("states", states)
        if values is None:
            return
        check_tensor("values", values)
        features = getattr(getattr(self, "value_proj", None), "in_features", "Dv")
        shape, wanted = list(values.shape), [*states.shape[:2], features]
        if shape[:2] != wanted[:2] or len(shape) != 3 or features not in ("Dv", shape[-1]):
            raise_value_error("values", f"{shape_of(*wanted)} to fit the states", shape)
        self._check_dtype("values", values)

    def _check_dtype(self, name: str, x: Tensor) -> None:
        check_like(name, x, next(self.parameters(), x))

    def _check_call(self, state: Any, memory: Any) -> None:
        """Raise unless the state and the memory of a call fit the module."""
        check_memory(memory)
        check_tensor("state", state)
        B, features = memory.key.shape[0], memory.key.shape[-1]
        features = getattr(self.query_proj, "in_features", features)
        if state.dim() not in (2, 3) or state.shape[0] != B or state.shape[-1] != features:
            expected = f"[{B}, {features}] or [{B}, Tq, {features}] to fit module and memory"
            raise_value_error("state", expected, list(state.shape))
        self._check_dtype("state", state)
        check_like("memory", memory.key, state, "the state's")
        if self.score_vector is not None and memory.key.shape[-1] != self.score_vector.shape[-1]:
            got = memory.key.shape[-1]
            raise_value_error(
                "memory", f"of keys of {self.score_vector.shape[-1]} features, as the module", got
            )
        check_temperature(self.temperature)

    def _remember(
        self, key: Tensor, value: Tensor, lengths: Tensor | None, mask: Tensor | None
    ) -> Memory:
        """Make the memory of projected keys."""
        return prepare(
            key, value, self.score_vector, activation=self.activation, lengths=lengths, mask=mask,
            backend=self.backend,
        )  # fmt: skip

    def _attend(
        self,
        query: Tensor,
        memory: Memory,
        need_weights: bool | str,
        need_statistics: bool = False,
        bias: Tensor | None = None,
        **span: Unpack[SpanTerms],
    ) -> AttentionOutput:
        """Run the op on a projected query, with span, position and sigma if given.

        The temperature divides the score, the bias and the prior.
        """
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        scale, bias = apply_temperature(self.temperature, scale, bias)
        sigma = span.get("sigma")
        if sigma is not None:
            span["sigma"] = sigma * self.temperature**0.5
        check_form(need_weights)
        if (memory.score_vector is None) != (self.score_vector is None):
            kind = "a dot" if self.score_vector is None else "an additive"
            raise_value_error(
                "memory", f"prepared for {kind} score, as the module has", f"one for {memory.score}"
            )
        need_weights = need_weights if span else bool(need_weights)
        return attend(
            query, memory, scale=scale, bias=bias, normalisation=self.normalisation,
            need_weights=need_weights, need_statistics=need_statistics, **span,
        )  # fmt: skip

    def forward(
        self,
        state: Tensor,
        memory: Memory,
        need_weights: bool | str = False,
        need_statistics: bool = False,
        **terms: Unpack[Terms],
    ) -> AttentionOutput:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            need_weights: return the weights too; ``"dense"`` is equivalent.
            need_statistics: return the rows' statistics, as :func:`attnfast.additive_attention`.

        Returns:
            ``context [B, Dv]`` or ``[B, Tq, Dv]``, and ``weights [B, (H,) Tk]`` or
            ``[B, (H,) Tq, Tk]`` or None, an :class:`attnfast.AttentionOutput`.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        try:
            step = state.dim() == 2
            query = self.query_proj(state.unsqueeze(1) if step else state)
            result = self._attend(query, memory, need_weights, need_statistics, **terms)
        except Exception:
            self._check_call(state, memory)
            raise
        return result.of_one_row() if step else result


class _AttentionWrapper(Module):
    """A module around an attention module, whose memory it takes."""

    __prepare_scriptable__ = refuse_script

    def __init__(self, attention: object):
        super().__init__()
        if not isinstance(attention, nn.Module) or not hasattr(attention, "prepare"):
            is_module = isinstance(attention, nn.Module)
            got = type(attention).__name__ if is_module else describe(attention)
            raise_type_error("attention", "a module of attnfast.nn", got)
        self.attention: Any = attention

    @property
    def backend(self) -> str | None:
        """The requested backend of the attention."""
        return getattr(self.attention, "backend", None)

    def prepare(
        self,
        states: Tensor,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Memory:
        """Make the memory, as the attention's ``prepare`` does.

        Args:
            states: encoder states ``[B, Tk, key_dim]``.
            lengths: ``[B]``, the number of states that are not padding.
            mask: boolean ``[B, Tk]``, True where a state may be attended to.
            values: ``[B, Tk, Dv]``, separate from the keys; None uses the states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        separate = () if values is None else (values,)
        return self.attention.prepare(states, lengths, mask, *separate)


class BahdanauAttention(_Attention):
    r"""Additive attention, :math:`e_{ij} = w^\top \tanh(W_q s_i + W_k h_j)`.

    Args:
        query_dim, key_dim, attn_dim: features of the decoder states, of the encoder states, and
            of the space in which they are compared.
        bias: give the query projection a bias.
        activation, backend, normalisation: as in :func:`attnfast.additive_attention`.

    Paper: Bahdanau, Cho and Bengio, ICLR 2015, arXiv:1409.0473.

    Example:
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> memory = attention.prepare(torch.randn(2, 5, 8), torch.tensor([5, 3]))
        >>> context, weights = attention(torch.randn(2, 6), memory, need_weights=True)
        >>> context.shape, weights.shape
        (torch.Size([2, 8]), torch.Size([2, 5]))
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        bias: bool = False,
        activation: str = "tanh",
        backend: str | None = None,
        *,
        normalisation: str = "softmax",
    ):
        check_sizes(query_dim=query_dim, key_dim=key_dim, attn_dim=attn_dim)
        check_flag("bias", bias)
        check_activation(activation)
        check_choice("normalisation", normalisation, NORMALISATIONS)
        super().__init__((attn_dim,), 1.0, backend)
        self.query_dim, self.key_dim, self.attn_dim = query_dim, key_dim, attn_dim
        self.activation, self.normalisation = activation, normalisation
        self.query_proj = nn.Linear(query_dim, attn_dim, bias=bias)
        self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)


class _Unit(Module):
    """Normalise vectors to length 1; half precision is squared in float32, to avoid overflow."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.to(accumulation_dtype(x.dtype)), dim=-1).to(x.dtype)


class LuongAttention(_Attention):
    r"""Luong's scores.

    ==================  ========================================  ===========================
    ``score``           :math:`e_{ij}`                            needs
    ==================  ========================================  ===========================
    ``dot``             :math:`s_i^\top h_j`                      ``query_dim == key_dim``
    ``scaled_dot``      :math:`s_i^\top h_j / \sqrt{d}`           ``query_dim == key_dim``
    ``general``         :math:`s_i^\top W h_j`
    ``scaled_general``  :math:`s_i^\top W h_j / \sqrt{d}`
    ``concat``          :math:`w^\top \tanh(W [s_i; h_j])`        ``attn_dim``
    ``cosine``          :math:`s_i^\top h_j / (|s_i| |h_j|)`      ``query_dim == key_dim``
    ==================  ========================================  ===========================

    d is the number of features of a state. The scaled scores suit Adam, whose steps are as large
    for every entry of W, so that a step changes an unscaled score by a multiple of d: the softmax
    saturates in the first steps of training, and hardly learns after that.

    Cosines are from −1 to 1, so that no weight is more than e² times another; a ``temperature``
    below 1, such as 0.1, makes the weights sharper. The matrix W of concat is stored in two parts,
    one for the states and one for the keys, so that the keys are projected once.

    Args:
        query_dim, key_dim: features of the decoder states and of the encoder states.
        score: one of the table.
        attn_dim: features of the concat score; None means ``query_dim``.
        backend, normalisation: as in :func:`attnfast.dot_attention`.

    Raises:
        ValueError: an unknown score, or dimensions that the score cannot compare.

    Papers: Luong, Pham and Manning, EMNLP 2015, arXiv:1508.04025; the cosine, Graves, Wayne and
    Danihelka, "Neural Turing Machines", 2014, arXiv:1410.5401.

    Example:
        >>> attention = attnfast.nn.LuongAttention(6, 8, "general")
        >>> context, _ = attention(torch.randn(2, 3, 6), attention.prepare(torch.randn(2, 5, 8)))
        >>> context.shape
        torch.Size([2, 3, 8])
    """

    #: The names of the scores.
    SCORES = ("dot", "scaled_dot", "general", "scaled_general", "concat", "cosine")
    _sizes: tuple[str, ...] = ("query_dim", "key_dim", "score")
    _defaults: ClassVar = {"attn_dim": None, **_Attention._defaults}

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        score: str = "general",
        attn_dim: int | None = None,
        backend: str | None = None,
        *,
        normalisation: str = "softmax",
    ):
        check_choice("score", score, self.SCORES)
        check_choice("normalisation", normalisation, NORMALISATIONS)
        check_sizes(query_dim=query_dim, key_dim=key_dim)
        if score in ("dot", "scaled_dot", "cosine") and query_dim != key_dim:
            raise ValueError(
                f"query_dim must equal key_dim for score {score!r}, got {query_dim} and {key_dim}"
            )
        attn_dim = query_dim if attn_dim is None else attn_dim
        check_sizes(attn_dim=attn_dim)
        super().__init__(
            (attn_dim,) if score == "concat" else None,
            None if score.startswith("scaled") else 1.0,
            backend,
        )
        self.query_dim, self.key_dim, self.score = query_dim, key_dim, score
        self.attn_dim = attn_dim if score == "concat" else None
        self.normalisation = normalisation
        self.query_proj = _Unit() if score == "cosine" else nn.Identity()
        self.key_proj = _Unit() if score == "cosine" else nn.Identity()
        if score in ("general", "scaled_general"):
            self.key_proj = nn.Linear(key_dim, query_dim, bias=False)
        if score == "concat":
            self.query_proj = nn.Linear(query_dim, attn_dim, bias=False)
            self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)


class MultiHeadAttention(_Attention):
    r"""Attention by several heads at once, with either score.

    .. math:: \alpha^h_{ij} = \mathrm{softmax}_j\left(
              \mathrm{score}(W^h_q s_i, W^h_k h_j)\right), \quad
              c_i = W_o [c^1_i; \dots; c^H_i], \quad
              c^h_i = \sum_j \alpha^h_{ij} W^h_v h_j

    Every head compares its own slice of the projected queries and keys and averages its own slice
    of the projected values. The dot score of a head is :math:`q \cdot k / \sqrt{A / H}` with A
    features of all heads, the additive score :math:`w^h \cdot \tanh(q + k)`.

    Args:
        query_dim, key_dim: features of the decoder states and of the encoder states.
        attn_dim: features of queries, keys, values and output, summed over the heads.
        num_heads: H, a divisor of ``attn_dim``.
        score: ``"dot"`` (scaled by the root of a head's features) or ``"additive"``.
        backend, normalisation: as in :func:`attnfast.dot_attention`.
        value_dim: features of values that are separate from the keys; None means ``key_dim``.
        positions: :class:`RelativePositions` with as many heads, added to the scores, or None.

    The weights are ``[B, H, Tq, Tk]``.

    Raises:
        ValueError: an unknown score, or heads that do not divide the features.

    Papers: Vaswani et al., NeurIPS 2017, arXiv:1706.03762; Chiu et al., ICASSP 2018,
    arXiv:1712.01769, for several heads in a recurrent decoder.

    Example:
        >>> attention = attnfast.nn.MultiHeadAttention(6, 8, attn_dim=4, num_heads=2)
        >>> context, _ = attention(torch.randn(2, 6), attention.prepare(torch.randn(2, 5, 8)))
        >>> context.shape
        torch.Size([2, 4])
    """

    _sizes: tuple[str, ...] = ("query_dim", "key_dim", "attn_dim", "num_heads", "score")

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        attn_dim: int,
        num_heads: int,
        score: str = "dot",
        backend: str | None = None,
        *,
        value_dim: int | None = None,
        positions: nn.Module | None = None,
        normalisation: str = "softmax",
    ):
        check_choice("normalisation", normalisation, NORMALISATIONS)
        value_dim = key_dim if value_dim is None else value_dim
        check_choice("score", score, ("dot", "additive"))
        check_sizes(
            query_dim=query_dim, key_dim=key_dim, attn_dim=attn_dim, num_heads=num_heads,
            value_dim=value_dim,
        )  # fmt: skip
        if attn_dim % num_heads:
            raise ValueError(f"num_heads must divide attn_dim {attn_dim}, got {num_heads}")
        head_dim = attn_dim // num_heads
        weight_shape, scale = ((num_heads, head_dim), 1.0) if score == "additive" else (None, None)
        super().__init__(weight_shape, scale, backend)
        fits = isinstance(positions, RelativePositions) and len(positions.weight) == num_heads
        if positions is not None and not fits:
            raise_type_error(
                "positions", f"RelativePositions of {num_heads} heads", describe(positions)
            )
        self.query_dim, self.key_dim, self.attn_dim = query_dim, key_dim, attn_dim
        self.num_heads, self.score, self.positions = num_heads, score, positions
        self.normalisation = normalisation
        self.query_proj = nn.Linear(query_dim, attn_dim, bias=False)
        self.key_proj = nn.Linear(key_dim, attn_dim, bias=False)
        self.value_proj = nn.Linear(value_dim, attn_dim, bias=False)
        self.out_proj = nn.Linear(attn_dim, attn_dim, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        heads, features = self.num_heads, x.shape[-1] // self.num_heads
        return x.view(*x.shape[:-1], heads, features).transpose(1, 2)  # [B, H, T, A/H]

    def _keys(self, states: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
        values = states if values is None else values
        key, value = (
            self._split(project(layer, x, self.backend))
            for layer, x in ((self.key_proj, states), (self.value_proj, values))
        )
        return key, value

    def forward(  # type: ignore[override]
        self,
        state: Tensor,
        memory: Memory,
        need_weights: bool | str = False,
        need_statistics: bool = False,
        offset: int = 0,
    ) -> AttentionOutput:
        """Attend from decoder states to a prepared memory.

        Args:
            state: ``[B, query_dim]`` for one decoder step or ``[B, Tq, query_dim]`` for many.
            memory: from :meth:`prepare`.
            need_weights: return the weights of all heads too.
            need_statistics: return the rows' statistics, as :func:`attnfast.additive_attention`.
            offset: the position of the first state, for relative positions.

        Returns:
            ``context [B, attn_dim]`` or ``[B, Tq, attn_dim]``, and ``weights [B, H, Tk]`` or
            ``[B, H, Tq, Tk]`` or None, an :class:`attnfast.AttentionOutput`.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        terms: Terms = {}
        if self.positions is not None:
            self._check_call(state, memory)
            rows = state.shape[1] if state.dim() == 3 else 1
            terms["bias"] = self.positions(rows, memory.key.shape[-2], offset)
        return super().forward(state, memory, need_weights, need_statistics, **terms)

    def _attend(self, query: Tensor, *arguments: Any, **span: Any) -> AttentionOutput:
        result = super()._attend(self._split(query), *arguments, **span)
        return result.with_context(self.out_proj(result.context.transpose(1, 2).flatten(2)))
