"""Layers: linear, convolutions, normalisations, pools, attention, padding and interpolation."""

from __future__ import annotations

from tests.random_programs.writer import Line, Operator, Skipped, Writer


def _linear(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 1)
    width, out = w.shape(x)[-1], w.random.randint(1, 3)
    weight, bias = w.other((out, width), 0.6), w.argument((out,))
    ways = [
        f"F.linear({x}, {weight}, {bias})",
        f"F.linear({x}, {weight})",
        f"F.linear({x}.relu(), {weight} * 0.5, {bias})",
    ]
    ways += [
        f"F.linear(F.linear({x}, {weight}), {weight}.t())",
        f"F.linear({x}, {weight}[:1])",
        f"F.linear({x}, {weight}) @ {weight}",
    ]
    other, cube = w.other(w.shape(x)), w.argument((out, width, width))
    ways += [
        f"F.bilinear({x}, {other}, {cube}, {bias})",
        f"F.linear({x}, F.normalize({weight}, dim=1), {bias})",
    ]
    return Line(w.random.choice(ways))


def _image(w: Writer, spatial: int) -> tuple[str, tuple[int, ...]]:
    """A tensor [b, c, *space], a view of one that is there or a new argument."""
    rank = spatial + 2
    if w.random.random() < 0.6:
        try:
            found = w.tensor(lambda t: 1 <= t.dim() <= rank and t.numel() > 1)
            shape = w.shape(found)
            full = (1,) * (rank - len(shape)) + shape
            return (found if len(shape) == rank else f"{found}.reshape({full})"), full
        except Skipped:
            pass
    shape = (
        w.random.randint(1, 2),
        w.random.randint(1, 4),
        *(w.random.randint(2, 4 if spatial < 3 else 2) for _ in range(spatial)),
    )
    return w.argument(shape), shape


def _convolution(w: Writer) -> Line:
    spatial = w.random.choice((1, 1, 2, 2, 3))
    x, shape = _image(w, spatial)
    channels, out = shape[1], w.random.randint(1, 3)
    groups = w.random.choice([g for g in (1, 1, 2, channels) if channels % g == 0])
    kernel = tuple(w.random.randint(1, min(3, s)) for s in shape[2:])
    stride, padding, dilation = w.pick(1, 1, 2), w.pick(0, 1, 0), w.pick(1, 1, 2)
    bias = w.argument((out * groups,))
    bias = w.random.choice((bias, "None"))
    if w.random.random() < 0.25:
        weight = w.argument((channels, out, *kernel))
        bias = bias if bias == "None" else w.argument((out * groups,))
        return Line(
            f"F.conv_transpose{spatial}d({x}, {weight}, {bias}, stride={stride}, padding={padding},"
            f" groups={groups})"
        )
    weight = w.other((out * groups, channels // groups, *kernel), 0.7)
    if w.random.random() < 0.2:
        return Line(f"F.conv{spatial}d({x}, {weight}, {bias}, padding='same', groups={groups})")
    return Line(
        f"F.conv{spatial}d({x}, {weight}, {bias}, stride={stride}, padding={padding}, dilation={dilation},"
        f" groups={groups})"
    )


def _optional(w: Writer, shape: tuple[int, ...]) -> str:
    return w.other(shape) if w.random.random() < 0.6 else "None"


def _over_the_end(w: Writer) -> Line:
    """Normalisations over the last axes."""
    x = w.tensor(lambda t: t.dim() >= 1)
    shape = w.shape(x)
    end = shape[-w.random.randint(1, len(shape)) :]
    ways = (
        f"F.layer_norm({x}, {end}, {_optional(w, end)}, {_optional(w, end)})",
        f"F.layer_norm({x}, {end})",
        f"F.rms_norm({x}, {end}, {_optional(w, end)})",
        f"F.normalize({x}, p={w.pick(1, 2, 3)}, dim={w.axis(x)})",
        f"F.rms_norm({x}, {end}, {_optional(w, end)}, 1e-3)",
    )
    return Line(w.random.choice(ways))


def _over_channels(w: Writer) -> Line:
    """Normalisations of [b, c, ...]."""
    x, shape = _image(w, w.random.choice((0, 1, 1, 2)))
    channels = shape[1]
    c = (channels,)
    weight, bias = (w.other(c), w.other(c)) if w.random.random() < 0.6 else ("None", "None")
    mean, var = w.argument(c, keep=True), w.argument(c, "torch.rand({shape}) + 0.5", keep=True)
    groups = w.random.choice([g for g in range(1, channels + 1) if channels % g == 0])
    ways = (
        f"F.group_norm({x}, {groups}, {weight}, {bias})",
        f"F.group_norm({x}, {groups})",
        f"F.instance_norm({x}, weight={weight}, bias={bias})",
        f"F.batch_norm({x}, {mean}.detach(), {var}.detach(), {weight}, {bias})",
        f"F.batch_norm({x}, None, None, {weight}, {bias}, training=True)",
        f"F.local_response_norm({x}, 2)",
    )
    return Line(w.random.choice(ways))


def _pool(w: Writer) -> Line:
    spatial = w.random.choice((1, 2, 2, 3))
    x, shape = _image(w, spatial)
    kernel, stride = w.random.randint(1, min(2, *shape[2:])), w.pick(1, 2)
    ways = [
        f"F.max_pool{spatial}d({x}, {kernel}, {stride})",
        f"F.avg_pool{spatial}d({x}, {kernel}, {stride})",
        f"F.avg_pool{spatial}d({x}, 2, 1, 1, count_include_pad=False)",
        f"F.adaptive_avg_pool{spatial}d({x}, {w.pick(1, 2)})",
        f"F.adaptive_max_pool{spatial}d({x}, {w.pick(1, 2)})",
        f"F.max_pool{spatial}d({x}, 2, 1, 1)",
    ]
    ways += [f"F.lp_pool{spatial}d({x}, 2, {kernel})"]
    if spatial == 1:
        ways += [f"F.max_unpool1d(*F.max_pool1d({x}, 1, 1, return_indices=True), 1)"]
    return Line(w.random.choice(ways))


def _attention(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() in (2, 3))
    shape = w.shape(x)
    keys = w.random.randint(1, 3)
    k = w.other((*shape[:-2], keys, shape[-1]))
    v = w.other((*shape[:-2], keys, w.random.choice((shape[-1], 2))))
    mask = w.argument((shape[-2], keys))
    ways = (
        f"F.scaled_dot_product_attention({x}, {k}, {v})",
        f"F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)",
        f"F.scaled_dot_product_attention({x}, {k}, {v}, attn_mask={mask})",
        f"F.scaled_dot_product_attention({x}, {k}, {v}, attn_mask={mask} < 1)",
        f"({x} @ {k}.mT).softmax(-1) @ {v}",
        f"F.scaled_dot_product_attention({x}[None], {k}[None], {v}[None], scale=0.5)",
    )
    return Line(w.random.choice(ways))


def _image_work(w: Writer) -> Line:
    x, shape = _image(w, 2)
    size, four = w.random.randint(1, 3), shape[1] % 4 == 0
    grid = w.argument((shape[0], 2, 2, 2), "torch.rand({shape}) * 1.6 - 0.8", keep=True)
    ways = [
        f"F.pad({x}, (1, 0, 1, 1))",
        f"F.pad({x}, (1, 1), mode='reflect')",
        f"F.pad({x}, (1, 1, 0, 1), mode='replicate')",
        f"F.pad({x}, (1, 0, 0, 1), mode='circular')",
        f"F.pad({x}, (-1, 0))",
        f"F.interpolate({x}, scale_factor=2)",
        f"F.interpolate({x}, size=({size}, 3), mode='bilinear', align_corners={w.pick(True, False)})",
        f"F.interpolate({x}, size=({size}, 3), mode='bicubic')",
        f"F.interpolate({x}, size=(3, {size}), mode='area')",
        f"F.unfold({x}, 2, padding=1)",
        f"F.fold(F.unfold({x}, 2, padding=1), {shape[2:]}, 2, padding=1)",
        f"F.grid_sample({x}, {grid}, align_corners=False)",
        f"F.grid_sample({x}, {grid}, mode='nearest', align_corners=True)",
        f"F.grid_sample({x}, {grid}, padding_mode='border', align_corners=False)",
        f"F.channel_shuffle({x}, 1)",
    ]
    ways += [f"F.pixel_shuffle({x}, 2)"] if four else []
    ways += [f"F.pixel_unshuffle({x}, 2)"] if shape[2] % 2 == 0 and shape[3] % 2 == 0 else []
    return Line(w.random.choice(ways))


def _other(w: Writer) -> Line:
    x = w.tensor(lambda t: t.dim() >= 1)
    slope = w.argument(())
    y = w.other(w.shape(x))
    if len(w.shape(x)) > 1 and w.random.random() < 0.15:  # PyTorch's second derivative of the kernel is wrong
        norm = f"torch.norm_except_dim({x}, 2, 0)"
        return Line(f"torch._weight_norm({x}, {norm} * {slope}, 0)", f"{x} * ({norm} * {slope} / {norm})")
    ways = [
        f"F.prelu({x}, {slope}.reshape(1))",
        f"F.cosine_similarity({x}, {y}, dim={w.axis(x)})",
        f"F.pairwise_distance({x}, {y})",
        f"{x}.cross({y}, dim=0)",
        f"F.pad({x}, (1, 2), value=0.5)",
        f"F.dropout({x}, 0.5, training=False)",
    ]
    return Line(w.random.choice(ways))


LAYERS: tuple[Operator, ...] = (
    *[_linear] * 3,
    *[_convolution] * 3,
    *[_over_the_end] * 2,
    *[_over_channels] * 2,
    *[_pool] * 2,
    *[_attention] * 2,
    _image_work,
    _other,
)
