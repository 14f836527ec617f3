"""A launch is judged the same however it is written: quoted, in compilation-config, as JSON, after --."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_deploy.launch.command import capture_sizes, serve_command
from dspark_deploy.preflight.vllm_build import CHOICES, KEYS, choices, vllm_folder
from dspark_deploy.profile.flags import as_vllm_reads, parse_flags
from tests.unit.findings import ADAPTIVE, ARGS, BASES, CUDA, LISTED, Change, after, change, findings
from tests.unit.profiles import load

SIZES = "cudagraph-capture-sizes"
INSIDE = ARGS + "compilation-config={cudagraph_capture_sizes: [6, 12, 18]}"


def said(folder: Path, changed: Change, base: str = "mi355x") -> set[str]:
    return {finding.code for finding in findings(base, changed, folder)}


def command(folder: Path, *sets: str, extra: tuple[str, ...] = ()) -> list[str]:
    text, facts = BASES["mi355x"]
    return serve_command(load(folder, text, list(sets)).profile, facts, 8000, list(extra))


@pytest.mark.parametrize(
    "sets",
    [
        (INSIDE,),
        (ARGS + "compilation-config='{\"cudagraph_capture_sizes\": [6, 12, 18]}'",),
        (ARGS + "compilation-config.cudagraph_capture_sizes=[6, 12, 18]",),
        (ARGS + "compilation-config={max_cudagraph_capture_size: 64}",),
    ],
)
def test_sizes_inside_compilation_config_are_the_launchs(tmp_path: Path, sets: tuple[str, ...]) -> None:
    assert f"--{SIZES}" not in command(tmp_path, *sets), "vLLM refuses both"
    codes = said(tmp_path, change(*sets))
    assert codes & {"CAPTURE_SIZES_MISS_STEPS", "CAPTURE_SIZE_TOO_SMALL"}


def test_sizes_inside_compilation_config_after_the_dashes(tmp_path: Path) -> None:
    extra = ("-cc.cudagraph_capture_sizes=[6,12]",)
    assert f"--{SIZES}" not in command(tmp_path, extra=extra)
    assert "CAPTURE_SIZES_MISS_STEPS" in said(tmp_path, after(*extra))


def test_the_place_of_sizes_inside_compilation_config_is_named(tmp_path: Path) -> None:
    found = next(f for f in findings("mi355x", change(INSIDE), tmp_path) if "MISS_STEPS" in f.code)
    assert found.where == "--set engine.args.compilation-config"


def test_sizes_given_twice_are_refused(tmp_path: Path) -> None:
    assert "VALUE_IMPOSSIBLE" in said(tmp_path, change(INSIDE, ARGS + f"{SIZES}=[6]"))
    assert "VALUE_IMPOSSIBLE" in said(tmp_path, Change([INSIDE], {}, ["--" + SIZES, "6"]))
    assert "VALUE_IMPOSSIBLE" not in said(tmp_path, change(INSIDE))


@pytest.mark.parametrize(
    "changed",
    [
        change(ADAPTIVE, ARGS + 'compilation-config=\'{"cudagraph_mode": "NONE"}\''),
        change(ADAPTIVE, ARGS + "optimization-level=0"),
        Change([ADAPTIVE], {}, ["-O0"]),
        Change([ADAPTIVE], {}, ["-cc.cudagraph_mode", "none"]),
    ],
)
def test_a_launch_without_graphs_is_seen(tmp_path: Path, changed: Change) -> None:
    assert "ADAPTIVE_NEEDS_GRAPHS" in said(tmp_path, changed)
    assert "ADAPTIVE_NEEDS_GRAPHS" not in said(tmp_path, change(ADAPTIVE, ARGS + "optimization-level=2"))


def test_quoted_numbers_are_numbers(tmp_path: Path) -> None:
    quoted = (ARGS + "tensor-parallel-size='4'", ARGS + "max-num-seqs='64'")
    assert said(tmp_path, change(*quoted)) == said(tmp_path, change())
    profile = load(tmp_path, BASES["mi355x"][0], list(quoted)).profile
    assert len(capture_sizes(as_vllm_reads(profile, parse_flags([])))) == 64


@pytest.mark.parametrize("text", ["'true'", "'False'"])
def test_quoted_switches_are_refused(tmp_path: Path, text: str) -> None:
    assert "VALUE_IMPOSSIBLE" in said(tmp_path, change(ARGS + f"enforce-eager={text}"))
    assert "VALUE_IMPOSSIBLE" in said(tmp_path, after("--enforce-eager=" + text.strip("'")))
    assert "VALUE_IMPOSSIBLE" not in said(tmp_path, change(ARGS + "enforce-eager=true"))


def test_a_flag_that_appends_is_given_for_each_value(tmp_path: Path) -> None:
    rendered = command(tmp_path, ARGS + "middleware=[a.B, c.D]")
    first = rendered.index("--middleware")
    assert rendered[first : first + 4] == ["--middleware", "a.B", "--middleware", "c.D"]
    both = after("--middleware", "a.B", "--middleware", "c.D")
    assert "FLAG_REPEATED" not in said(tmp_path, both)
    assert parse_flags(both.after).args == {"middleware": ["a.B", "c.D"]}


def cuda(arch: str, machine: str, **facts: object) -> Change:
    return Change(
        [ADAPTIVE, f"hardware={{platform: cuda, arch: {arch}, gpus: 4}}"],
        {"gpu_platform": "cuda", "gpus": [machine] * 4, **facts},
    )


def test_the_machine_has_the_last_word_about_its_architecture(tmp_path: Path) -> None:
    assert {"ARCH_DIFFERS", "ADAPTIVE_SM90"} <= said(tmp_path, cuda("sm100", "sm90"))
    assert not {"ARCH_DIFFERS", "ADAPTIVE_SM90"} & said(tmp_path, cuda("sm100", "sm100"))
    assert "ARCH_DIFFERS" not in said(tmp_path, cuda("sm100", "nvidia")), "the driver alone tells no more"


@pytest.mark.parametrize(
    ("flags", "too_few"),
    [
        ({"data-parallel-size": 2}, True),
        ({"data-parallel-size": 2, "tensor-parallel-size": 2}, False),
        ({"data-parallel-size": 8, "data-parallel-size-local": 2}, True),
        ({"data-parallel-size": 8, "data-parallel-size-local": 1}, False),
        ({"data-parallel-size": 8, "data-parallel-backend": "ray"}, False),
        ({"data-parallel-size": 8, "data-parallel-rank": 3}, False),
        ({"data-parallel-size": 8, "data-parallel-external-lb": "true"}, False),
        ({"data-parallel-size": 2, "nnodes": 2}, False),
        ({"data-parallel-size": 4, "nnodes": 2}, True),
        ({"tensor-parallel-size": 8, "nnodes": 2}, False),
    ],
)
def test_every_rank_takes_a_gpu(tmp_path: Path, flags: dict[str, object], too_few: bool) -> None:
    codes = said(tmp_path, change(*(f"{ARGS}{name}={value}" for name, value in flags.items())))
    assert ("GPUS_TOO_FEW" in codes) is too_few


def test_no_nodes_is_no_number_of_nodes(tmp_path: Path) -> None:
    assert "VALUE_IMPOSSIBLE" in said(tmp_path, change(ARGS + "nnodes=0"))


def test_two_lists_of_visible_gpus_that_differ(tmp_path: Path) -> None:
    def lists(hip: str, cuda_list: str) -> Change:
        return change(
            f"engine.env.HIP_VISIBLE_DEVICES='{hip}'", f"engine.env.CUDA_VISIBLE_DEVICES='{cuda_list}'"
        )

    assert "VISIBLE_DEVICES_CONTRADICT" in said(tmp_path, lists("0,1,2,3", "4,5,6,7"))
    assert "VISIBLE_DEVICES_CONTRADICT" not in said(tmp_path, lists("0,1,2,3", "0,1,2,3"))


@pytest.mark.parametrize(
    "changed",
    [
        change(ARGS + "compilation-config={cudagraph_mod: FULL}", **LISTED),
        Change([], dict(LISTED), ["-cc.cudagraph_mod=FULL"]),
        Change([], dict(LISTED), ["--kv_cache_dtype", "fp9"]),
    ],
)
def test_what_vllm_does_not_list_is_refused_with_the_nearest(tmp_path: Path, changed: Change) -> None:
    (found,) = [f for f in findings("mi355x", changed, tmp_path) if f.code == "VALUE_UNKNOWN"]
    assert found.remedy in ("did you mean cudagraph_mode?", "did you mean fp8?")


def test_the_lists_of_the_installed_vllm_are_read() -> None:
    found = choices(vllm_folder())
    assert set(found) == {*CHOICES, *KEYS}
    assert {"auto", "fp8"} <= set(found["kv-cache-dtype"]) and "bfloat16" in found["dtype"]
    assert {"mode", "cudagraph_mode", "cudagraph_capture_sizes"} <= set(found["compilation-config"])
    assert all(value for values in found.values() for value in values)


def test_a_list_that_is_not_plain_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/cache.py").write_text('CacheDType = Literal["auto", Others]\n')
    (tmp_path / "config/model.py").write_text(
        'ModelDType = Literal[\n    "auto",  # or "not"\n    "half",\n]\n'
    )
    assert choices(tmp_path) == {"dtype": ["auto", "half"]}
    assert choices(None) == {}


def test_a_flag_that_ends_vllm_is_refused(tmp_path: Path) -> None:
    assert "FLAG_UNREAD" in said(tmp_path, after("--help")) and "FLAG_UNREAD" in said(tmp_path, after("-h"))
    assert "FLAG_UNREAD" not in said(tmp_path, after("--headless"))


def test_an_image_for_amd_is_not_judged_on_cuda(tmp_path: Path) -> None:
    image = "engine.image=vllm/vllm-openai-rocm:v0.21.0"
    assert "IMAGE_KNOWN_BAD" in said(tmp_path, change(image))
    assert "IMAGE_KNOWN_BAD" not in said(
        tmp_path, change(image, CUDA, gpu_platform="cuda", gpus=["sm100"] * 4)
    )
