"""The config: what it accepts, and that every mistake is told with its place and a suggestion."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from psgrad.config import Config, config_from, load_config
from psgrad.errors import EXIT_USAGE, ConfigError

MINIMAL = """\
version: 1
model: {factory: my_pkg.models:build}
loss: cross_entropy
data: {path: train.parquet, inputs: pixels, target: label}
output: runs/digits
"""
PRIVATE = """\
privacy:
  steps: 300
  delta: 1e-5
  expected_batch_size: 128
  sampling: {scheme: poisson, sample_rate: 0.0712}
  clipping: {norm: 1.0}
  noise: {multiplier: 1.1}
  optimizer: {name: SGD, kwargs: {lr: 0.5, momentum: 0.9}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(folder: Path, text: str, *overrides: str) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(str(path), "config.yaml")


# -- What is accepted ----------------------------------------------------------------------------------------


def test_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))

    assert config.base == tmp_path
    assert config.model.mode == "eval"
    assert config.loss.name == "cross_entropy"
    assert (config.engine.device, config.engine.chunk_size, config.engine.verify) == ("auto", "auto", 3)
    assert (config.analyze.top, config.analyze.review_fraction) == (20, 0.01)
    assert config.report.include_inputs
    assert config.output == Path("runs/digits")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        ("-.5", -0.5),
        (".inf", float("inf")),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("<<", "<<"),
        ("[1, [a]]", [1, ["a"]]),
    ],
)
def test_values_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    config = load_config(write(tmp_path, MINIMAL.replace("build}", f"build, kwargs: {{x: {text}}}}}")))

    assert config.model.kwargs == {"x": value}
    assert type(config.model.kwargs["x"]) is type(value)


def test_overrides_are_yaml_and_the_last_wins(tmp_path: Path) -> None:
    overrides = [
        "engine.verify=1",
        "engine.verify=0",
        "loss.label_smoothing=1e-1",
        "model.kwargs.width=3",
        'output="no"',
        "report.title=a=b",
        "data.inputs=[a, b]",
    ]
    config = load_config(write(tmp_path, MINIMAL), overrides)

    assert config.engine.verify == 0
    assert config.loss.options == {"label_smoothing": 0.1}
    assert config.model.kwargs == {"width": 3}
    assert config.output == Path("no")
    assert config.report.title == "a=b"
    assert config.data.inputs == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", "auto"),
        ("2GiB", 2 << 30),
        ("1.5 gib", 3 << 29),
        ("500 MB", 500_000_000),
        ("4mib", 4 << 20),
        ("1e9", None),
        ("2000000", 2_000_000),
        (".5TB", 500_000_000_000),
    ],
)
def test_memory_is_a_size_with_a_unit(tmp_path: Path, text: str, size: object) -> None:
    path = write(tmp_path, MINIMAL + f"engine: {{memory: {text}}}\n")
    if size is None:
        with pytest.raises(ConfigError, match="expected auto, or a size"):
            load_config(path)
        return
    config = load_config(path)
    assert config.engine.memory == size
    assert Config.model_validate(config.model_dump()).engine.memory == size  # as the manifest has it


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["loss.weight=[1, 2]", "model.kwargs={a: [1, null]}"],
        ["privacy.sampling={scheme: fixed, batch_size: 128}", "privacy.unit={column: user}"],
        ["privacy.clipping={groups: layer, norm: 2, rule: automatic}"],
        ["privacy.noise={target_epsilon: 3}"],
        [
            "influence.queries={path: queries.npz, inputs: x, target: y}",
            "influence.method={name: tracin}",
            "influence.checkpoints=[{path: a.pt, learning_rate: 0.1}]",
            "influence.index={path: there}",
        ],
        ["influence.evaluate.train={optimizer: newton, weight_decay: 0.1}"],
    ],
    ids=["private", "loss", "sampling", "clipping", "noise", "influence", "evaluate"],
)
def test_a_resolved_config_loads_again(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(write(tmp_path, MINIMAL + PRIVATE), overrides)
    again = load_config(write(tmp_path, yaml.safe_dump(config.model_dump(mode="json"))))
    assert again == config


def test_is_frozen(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.output = Path("elsewhere")  # type: ignore[misc]


@pytest.mark.long
def test_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, psgrad.config; print([name for name in ('torch', 'pandas', 'numpy') if name in"
        " sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


# -- What is refused -----------------------------------------------------------------------------------------


def test_all_problems_at_once_with_their_lines(tmp_path: Path) -> None:
    text = (
        MINIMAL.replace("version: 1", "version: 2")
        + "engine:\n  chunk_sise: 4\n  verify: three\nanalyse: {}\n"
    )
    message = error_of(tmp_path, text, "analyze.top=0")

    assert message.splitlines()[0] == "the config config.yaml has 5 problems:"
    assert "config.yaml:1: version: got 2, expected 1" in message
    assert "config.yaml:7: engine.chunk_sise: unknown key; did you mean chunk_size? known here" in message
    assert "config.yaml:8: engine.verify: got 'three', expected a whole number" in message
    assert "config.yaml:9: analyse: unknown key; did you mean analyze?" in message
    assert "--set analyze.top=0: analyze.top: got 0, expected at least 1" in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("version: 1", "version: true", "version: got true, expected 1"),
        ("version: 1\n", "", "version: missing; it is required"),
        ("build}", "build, modus: train}", "model.modus: unknown key; did you mean mode?"),
        ("build}", "build, mode: trian}", "model.mode: got 'trian', expected one of eval, train; did you"),
        ("my_pkg.models:build", "my_pkg.models.build", "model.factory: 'my_pkg.models.build' does not name"),
        ("my_pkg.models:build", "'my pkg:build'", "expected module:callable or file.py:callable"),
        ("build}", "build, kwargs: 3}", "model.kwargs: got 3, expected a group of keys and values"),
        ("build}", "build, kwargs: {1: a}}", "got 1, expected a string"),
        ("build}", "build, state_dict_key: ema}", "save the model's own state dict alone"),
        ("build}", "build, timm: resnet50}", "set factory: timm:create_model"),
        ("build}", "build, load: 4bit}", "save the quantised model by save_pretrained"),
        ("build}", "build, adapter: {create: lora}}", "peft.get_peft_model(model, settings).save_pretrained"),
        ("build}", "build, adapter: []}", "model.adapter: got an empty list, expected a string"),
        ("build}", "build, adapter: lora}", "adapter belongs to a pretrained model, and there is a factory"),
        ("loss: cross_entropy", "loss: cross_entrpy", "there is no loss 'cross_entrpy'; did you mean"),
        (
            "loss: cross_entropy",
            "loss: {name: 'losses.py:mine', delta: 2.0}",
            "the loss 'losses.py:mine' does not take delta",
        ),
        (
            "loss: cross_entropy",
            "loss: {name: 'losses.py:mine', columns: [a]}",
            "does not take columns; name the columns in data.target, as a list",
        ),
        ("loss: cross_entropy", "loss: 3", "loss: got 3, expected a group of keys and values"),
        ("train.parquet", "train.xlsx", "data.path: 'train.xlsx' does not end in one of .csv, .tsv"),
        (
            "path: train.parquet",
            "factory: a.py:b, path: train.parquet",
            "give exactly one of path (a file), dataset (of the datasets library)",
        ),
        ("path: train.parquet, ", "", "give exactly one of path (a file), dataset (of the datasets library)"),
        ("inputs: pixels, ", "", "inputs is missing"),
        ("inputs: pixels", "inputs: [a, a]", "data.inputs: a column is named twice"),
        ("inputs: pixels", "inputs: [a, 3]", "data.inputs: got a list, expected one column name or a list"),
        ("inputs: pixels", "inputs: pixels, kwargs: {a: 1}", "kwargs are the arguments of a factory"),
        *(
            (
                "inputs: pixels",
                f"inputs: pixels, {key}",
                f"{key.partition(':')[0]} is given, and nothing reads",
            )
            for key in (
                "tokenizer: t",
                "max_length: 3",
                "truncation: left",
                "size: 8",
                "crop: 8",
                "mean: [1, 2, 3]",
                "std: [1, 2, 3]",
            )
        ),
        ("inputs: pixels", "inputs: pixels, stack: true", "name inputs as keyword: column for one of each"),
        ("inputs: pixels", "text: pixels, masked: 0.2", "15 % of the tokens are hidden"),
        (", target: label", "", "data.target is missing: the loss 'cross_entropy' compares"),
        ("output: runs/digits", "output: 3", "output: got 3, expected a path"),
        (
            "output: runs/digits",
            "output: runs/digits\nchunk_size: 3",
            "chunk_size: unknown key; did you mean engine.chunk_size?",
        ),
        ("output: runs/digits", "output: runs/digits\nbase: /", "base: unknown key"),
        ("output: runs/digits", "output: runs/digits\n_base: /", "_base: unknown key"),
        ("output: runs/digits", "output: runs/digits\n3: 4", "3: got "),
    ],
)
def test_each_mistake_is_reported(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in MINIMAL
    message = error_of(tmp_path, MINIMAL.replace(old, new, 1))

    assert expected in message
    assert message.startswith("the config config.yaml has 1 problem:")


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("chunk_size: 0", "engine.chunk_size: got 0, expected a whole number of at least 1, or auto"),
        ("chunk_size: true", "engine.chunk_size: got true, expected"),
        ("chunk_size: 2.0", "engine.chunk_size: got 2.0, expected"),
        ("memory: lots", "engine.memory: got 'lots', expected auto, or a size such as 2GiB"),
        ("memory: 2 GiBs", "engine.memory: got '2 GiBs', expected auto, or a size"),
        ("memory: -2GiB", "engine.memory: got '-2GiB', expected auto, or a size"),
        ("memory: true", "engine.memory: got true, expected auto, or a size"),
        ("memory: 2.5", "engine.memory: got 2.5, expected auto, or a size"),
        ("memory: 2", "engine.memory: got 2, which is 2 bytes; expected at least 1MiB; is its unit right?"),
        ("memory: 1GiB, chunk_size: 8", "memory says how large an automatic chunk may get, and chunk_size"),
        ("verify: -1", "engine.verify: got -1, expected at least 0"),
        ("verify: true", "engine.verify: got true, expected a whole number"),
        ("dtype: float8", "engine.dtype: got 'float8', expected one of auto, float32, float64, bfloat16"),
        ("device: 0", "engine.device: got 0, expected a string"),
        ("capture: on", "engine.capture: got 'on', expected one of auto, off"),
        ("tokens_per_chunk: 8", "engine.tokens_per_chunk: not a key here: set engine.memory"),
    ],
)
def test_engine_values(tmp_path: Path, engine: str, expected: str) -> None:
    assert expected in error_of(tmp_path, MINIMAL + f"engine: {{{engine}}}\n")


@pytest.mark.parametrize("fraction", ["0", "1", ".nan", "true", "'0.5'"])
def test_review_fraction_lies_between_0_and_1(tmp_path: Path, fraction: str) -> None:
    assert f"--set analyze.review_fraction={fraction}: analyze.review_fraction: got " in error_of(
        tmp_path, MINIMAL, f"analyze.review_fraction={fraction}"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("engine.verify", "--set engine.verify: expected a dotted path, an equals sign and a value"),
        ("=3", "--set =3: expected a dotted path"),
        ("engine..verify=3", "expected a dotted path"),
        ("output.x=3", "--set output.x=3: output is 'runs/digits', which has no keys below it"),
        ("engine.verfy=3", "--set engine.verfy=3: engine.verfy: unknown key; did you mean verify?"),
        ("engin.verify=3", "--set engin.verify=3: engin: unknown key; did you mean engine?"),
        ("engine.verify=[", "--set engine.verify=[: value:1:2: not valid YAML"),
        ("engine.verify=!!python/none", "a plain value was expected here, not !!python/none"),
    ],
)
def test_wrong_overrides_are_named(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in error_of(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; expected the keys version, model"),
        ("- 1", "holds a list"),
        ("a: [1", "config.yaml:1:6: not valid YAML"),
        ("a: 1\na: 2", "config.yaml:2:1: not valid YAML: the key 'a' is already given in line 1"),
        ("a: {b: 1,\n  b: 2}", "config.yaml:2:3: not valid YAML: the key 'b' is already given in line 1"),
        ("a: 1\n--- \nb: 2", "not valid YAML"),
        ("a: \0", "not valid YAML"),
        ("a: &b 1\nc: *b", "config.yaml:2:4: not valid YAML: the alias *b; write the value itself"),
        ("a: &a [*a]", "config.yaml:1:8: not valid YAML: the alias *a"),
        ("a: !!seq {b: 1}", "a plain value was expected here, not !!seq"),
        ("a: !!bool yes", "'yes' is not a value of the type bool"),
        ("a: " + "[" * 5000, "not valid YAML: nested too deeply"),
        (
            "a: !!python/object/apply:os.system [exit]",
            "a plain value was expected here, not !!python/object/apply:os.system",
        ),
        ("? [1]\n: 2", "a plain value was expected here, not !!seq"),
        ("a: !!int x", "'x' is not a value of the type int"),
        ("a: " + "9" * 5000, "is not a value of the type int"),
    ],
)
def test_not_yaml(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of(tmp_path, text)


def test_missing_file_directory_and_binary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config file .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected a YAML file in UTF-8"):
        load_config(tmp_path / "binary.yaml")


# -- Properties ----------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = (
        [leaf for key, child in value.items() for leaf in leaves(child, (*path, key))]
        if isinstance(value, dict)
        else []
    )
    return [path, *below] if path else below


FULL = Config.model_validate(yaml.safe_load(MINIMAL)).model_dump(mode="json")


PRIVATE_CONFIG = yaml.safe_load(MINIMAL + PRIVATE)
OF_PRIVACY = leaves({"privacy": PRIVATE_CONFIG["privacy"]})[1:]
OF_PRIVACY += [("privacy", key) for key in ("relation", "unit", "checkpoint_every", "trainable")]
OF_PRIVACY += [("privacy", "clipping", "groups")]


@pytest.mark.parametrize(
    ("full", "paths"),
    [
        pytest.param(FULL, leaves(FULL), id="whole", marks=pytest.mark.long),
        pytest.param(PRIVATE_CONFIG, OF_PRIVACY, id="privacy"),
    ],
)
@given(data=st.data())
def test_any_value_anywhere_is_accepted_or_reported(
    tmp_path_factory: pytest.TempPathFactory, full: Any, paths: list[Any], data: st.DataObject
) -> None:
    path, value = data.draw(st.sampled_from(paths)), data.draw(plain_values | st.integers(-3, 3))
    content, folder = copy.deepcopy(full), tmp_path_factory.getbasetemp()
    group = content
    for key in path[:-1]:
        group = group[key]
    group[path[-1]] = value
    try:
        config = load_config(write(folder, yaml.safe_dump(content, allow_unicode=True)))
    except ConfigError as error:
        assert ".".join(path[:1]) in str(error)  # noqa: PT017
        return
    resolved = yaml.safe_dump(config.model_dump(mode="json"), allow_unicode=True)
    again = load_config(write(folder, resolved))
    assert (again.output, again.privacy) == (config.output, config.privacy)


@given(text=st.text(alphabet="abc:-[]{}&*!?|>'\"#%@,~ \n\t01.", max_size=40))
def test_any_text_is_accepted_or_reported(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(write(tmp_path_factory.getbasetemp(), text))


@pytest.mark.long
@given(text=st.text(max_size=30))
def test_any_override_is_accepted_or_reported(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = write(tmp_path_factory.getbasetemp(), MINIMAL)
    with pytest.raises(ConfigError):
        load_config(file, [f"engine.{text}"])


def test_base_of_plain_values_and_of_a_copy(tmp_path: Path) -> None:
    content = {
        "version": 1,
        "model": {"factory": "model.py:build"},
        "loss": "mse",
        "data": {"path": "rows.csv", "inputs": "a", "target": "y"},
        "output": "out",
    }
    assert config_from(content).base == Path()
    config = config_from(content, base=tmp_path)
    assert config.base == config.model_copy(update={"output": Path("there")}).base == tmp_path
