"""`cbjax generate`, run in this process on a tiny model with a tokenizer of single characters."""

import contextlib
import io
import json
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, __version__, cli

GOLDENS = Path(__file__).parent / "goldens" / "tiny_llama"
SPECIALS = ["<s>", "<a>", "</s>", "<|user|>", "<|assistant|>", "<b>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL = ["--max-new-tokens", "8", "--block-size", "4", "--num-blocks", "64", "--max-batch-tokens", "64"]
USER = 3
ASSISTANT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model of 128 ids, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(GOLDENS / "single", folder, dirs_exist_ok=True)
    letters = string.ascii_letters + string.digits + string.punctuation + " \n"
    vocabulary = {token: id for id, token in enumerate([*SPECIALS, *letters])}
    vocabulary |= {chr(0x100 + id): id for id in range(len(vocabulary), 128)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture(scope="module")
def lm(folder):
    """The same model through the library, for what the command line has to say."""
    model = CausalLM.from_pretrained(folder)
    yield model
    model.close()


def texts(lm, prompts, **settings):
    config = ContinuousBatchingConfig(
        block_size=4, num_blocks=64, max_batch_tokens=64, compilation_cache=False, **settings
    )
    return [output.text for output in lm.generate_batch(prompts, GenerationConfig(max_new_tokens=8), config).values()]


def chat(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def run(folder, capsys):
    """Runs the command on the tiny model: exit status, standard output, standard error."""

    def run(*arguments, model=folder, small=SMALL):
        status = cli.main(["generate", "--model", str(model), *small, *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# One prompt.


def test_a_single_prompt_is_answered_on_standard_output(run, lm):
    status, out, err = run("hello", "--raw")
    assert (status, out) == (0, texts(lm, ["hello"])[0] + "\n")
    assert "generated tokens/s" in err


def test_a_single_prompt_streams_piece_by_piece(folder, lm):
    pieces = []

    class Pipe(io.StringIO):
        def write(self, text):
            pieces.append(text)
            return len(text)

    with contextlib.redirect_stdout(Pipe()):
        assert cli.main(["generate", "--model", str(folder), *SMALL, "--raw", "hello"]) == 0
    assert "".join(pieces) == texts(lm, ["hello"])[0] + "\n"
    assert len([piece for piece in pieces if piece.strip()]) > 3


def test_a_dash_reads_the_prompt_from_standard_input(run, lm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert run("-", "--raw")[1] == texts(lm, ["hello"])[0] + "\n"


def test_chat_is_the_default_where_there_is_a_template(run, lm):
    expected = texts(lm, [chat("hi")])[0] + "\n"
    assert run("hi")[1] == run("hi", "--chat")[1] == expected
    assert run("hi", "--raw")[1] == texts(lm, ["hi"])[0] + "\n" != expected


def test_the_table_on_standard_error_says_what_was_done(run):
    _, _, err = run("hello", "--raw")
    labels = ["requests", "tokens", "speed", "first token", "steps", "programs compiled", "blocks", "KV pressure"]
    table = [line for line in err.splitlines() if line.startswith(tuple(labels))]
    assert [line.split("  ")[0] for line in table] == labels
    assert "1 finished" in table[0]
    assert "5 prompt" in table[1]


def test_the_report_is_shown_when_asked_for(run):
    assert "what the workload can need" not in run("hello", small=SMALL)[2]
    status, _, err = run("hello", "--report", small=["--max-new-tokens", "2", "--block-size", "4"])
    assert status == 0
    assert "what the workload can need" in err
    assert "allow_block_sharing" in err


# Many prompts.


def test_many_prompts_are_shown_with_their_names(run, lm):
    status, out, err = run("one", "two", "three", "--raw")
    expected = texts(lm, ["one", "two", "three"])
    assert (status, out) == (0, "".join(f"[req_{i}] {text}\n\n" for i, text in enumerate(expected)))
    assert "3 finished" in err


def test_a_recorded_run_can_be_replayed(run, capsys, tmp_path):
    path = tmp_path / "run.cbjax"
    assert run("one", "two", "three", "--raw", "--record", path)[0] == 0
    assert cli.main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "engine of 64 blocks of 4, fifo, arc; admitted 0, 1, 2" in out
    assert "3 submitted, 3 ended (3 length), 0 cancelled" in out


def test_a_file_has_a_prompt_of_any_form_on_each_line(run, lm, tmp_path):
    messages = [*chat("hi"), {"role": "assistant", "content": "yo"}, *chat("bye")]
    lines = ["text", [9, 10, 11], {"prompt": "a prompt"}, {"prompt": [12, 13]}, {"text": "t"}, {"messages": messages}]
    content = "\n".join([*(json.dumps(line) for line in lines), "", "  ", '"a\\nb"'])
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    file.write_text(content, encoding="utf-8")
    status, _, _ = run("first", "--raw", "--file", file, "--json", out)
    assert status == 0
    outputs = json.loads(out.read_text())["outputs"]
    encode = lm.tokenizer.encode
    expected = [encode("first"), encode("text"), [9, 10, 11], encode("a prompt"), [12, 13], encode("t")]
    assert [output["prompt_ids"] for output in outputs] == [*expected, lm.tokenizer.chat(messages), encode("a\nb")]
    assert [output["text"] for output in outputs] == texts(lm, [output["prompt_ids"] for output in outputs])


def test_a_line_ends_at_a_newline_and_at_no_other_separator(run, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    # U+0085 and U+2028 may stand in a JSON string as they are.
    file.write_bytes('{"prompt": [7], "note": "a\u2028b\u0085c"}\r\n[8]\n'.encode())
    assert run("--file", file, "--json", out)[0] == 0
    assert [output["prompt_ids"] for output in json.loads(out.read_text())["outputs"]] == [[7], [8]]


def test_a_json_file_holds_settings_summary_and_outputs(run, lm, tmp_path):
    path = tmp_path / "out.json"
    status, out, _ = run("one", "two", "--raw", "--json", path, "--seed", "3")
    assert status == 0
    assert out.startswith("[req_0] ")
    document = json.loads(path.read_text())
    assert list(document) == ["settings", "summary", "outputs"]
    assert document["settings"]["seed"] == 3
    assert document["settings"]["max_new_tokens"] == 8
    assert document["settings"]["prompts"] == ["one", "two"]
    assert document["summary"]["requests"] == {"finished": 2}
    assert document["summary"]["tokens_per_second"] > 0
    first = document["outputs"][0]
    assert first["request_id"] == "req_0"
    assert first["text"] == texts(lm, ["one"])[0]
    assert first["text"] == lm.tokenizer.decode(first["generated_tokens"])
    assert (first["status"], first["finish_reason"], first["error"]) == ("FINISHED", "length", None)


@pytest.mark.parametrize("prompts", [["one"], ["one", "two"]])
def test_json_on_standard_output_stands_there_alone(run, prompts):
    status, out, err = run(*prompts, "--json", "-")
    assert status == 0
    assert len(json.loads(out)["outputs"]) == len(prompts)
    assert "generated tokens/s" in err


def test_sampling_options_reach_the_model(run):
    hot = ["hello", "--temperature", "3", "--top-k", "100", "--top-p", "0.99"]
    greedy, first, again, other = (
        run(*options)[1] for options in (["hello"], [*hot, "--seed", "1"], [*hot, "--seed", "1"], [*hot, "--seed", "2"])
    )
    assert first == again
    assert len({greedy, first, other}) == 3
    assert run("hello", "--temperature", "0")[1] == greedy


# Errors.


def test_several_continuations_are_shown_with_their_names_and_not_streamed(run):
    status, out, _ = run("--raw", "abc", "-n", "3", "--temperature", "5", "--seed", "1", *SMALL)
    assert status == 0
    assert [line.partition("]")[0] for line in out.splitlines() if line.startswith("[req_")] == [
        "[req_0",
        "[req_0__child#1",
        "[req_0__child#2",
    ]


def test_the_space_for_offloads_reaches_the_engine(run):
    status, _, err = run("abc", "--cpu-offload-space", "0.25", "--report", *SMALL)
    assert status == 0
    (line,) = [line for line in err.splitlines() if line.startswith("cpu_offload_space ")]
    assert line.split()[1] == "0.25"


def test_the_batch_invariant_mode_is_proven_and_reported(run):
    status, _, err = run("abc", "--batch-invariant", "--report", *SMALL)
    assert status == 0
    (line,) = [line for line in err.splitlines() if line.startswith("batch_invariant ")]
    assert "all give the same bits" in line


def test_a_bad_prompt_among_good_ones_fails_alone_and_the_status_tells(run, lm, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("[9, 10]\n[9, 500]\n[]\n[11]\n")
    status, out, err = run("--file", file)
    assert status == 1
    assert "cbjax: req_1 failed: token ids must be in [0, 128)" in err
    assert "cbjax: req_2 failed: a prompt has at least one token" in err
    assert "2 finished, 2 failed" in err
    good = texts(lm, [[9, 10], [11]])
    assert f"[req_0] {good[0]}\n" in out
    assert f"[req_3] {good[1]}\n" in out


def test_a_single_bad_prompt_fails(run):
    status, out, err = run("x" * 300)
    assert (status, out.strip()) == (1, "")
    assert "256 positions" in err


def test_text_for_a_model_without_a_tokenizer_fails(run):
    status, _, err = run("hello", model=GOLDENS / "single")
    assert status == 1
    assert "no tokenizer" in err


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["x", "--max-new-tokens", "0"], ["max_new_tokens must be at least 1"]),
        (["x", "--block-size", "2"], ["block_size must be at least 4"]),
        (["x", "--temperature", "-1"], ["temperature"]),
        (["x", "--top-p", "2"], ["top_p"]),
        (["x", "--seed", "-1"], ["seed"]),
        (["--file", "no/such/file.jsonl"], ["no/such/file.jsonl"]),
        (["x", "--json", "no/such/folder/out.json"], ["no/such/folder", "does not exist"]),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(run, monkeypatch, arguments, messages):
    monkeypatch.setattr(CausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("the model is loaded"))
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("cbjax: ")
    assert len(err.strip().splitlines()) == 1
    for message in messages:
        assert message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "every line is JSON"),
        ("5", "got 5"),
        ("null", "got None"),
        ('{"prompts": "x"}', "got ['prompts']"),
        ('{"prompt": "x", "text": "y"}', "exactly one"),
        ('{"prompt": {"a": 1}}', "a prompt is text"),
    ],
)
def test_a_bad_line_of_a_file_is_named(run, tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n\n{line}\n')
    status, _, err = run("--file", file)
    assert status == 1
    assert f"{file}, line 3" in err
    assert message in err


def test_a_missing_model_is_an_error_of_one_line(run, tmp_path):
    status, _, err = run("x", model=tmp_path / "nowhere")
    assert status == 1
    assert "nowhere" in err
    assert "Traceback" not in err


def test_a_pool_that_is_too_large_is_an_error_with_the_knobs(run):
    status, _, err = run("x", "--num-blocks", 10**12)
    assert status == 1
    assert "lower num_blocks" in err


def test_an_interrupt_ends_with_status_130(run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(CausalLM, "stream", interrupted)
    status, _, err = run("x")
    assert status == 130
    assert "interrupted" in err


# Usage.


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["produce"],
        ["generate", "x", "--no-such-option"],
        ["generate", "x", "--chat", "--raw"],
        ["generate", "x", "--max-new-tokens", "many"],
        ["generate", "x", "--dtype", "int8"],
        ["generate", "x", "--scheduler", "lifo"],
    ],
)
def test_bad_usage_ends_with_status_2_and_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: cbjax" in capsys.readouterr().err


@pytest.mark.parametrize("empty_file", [False, True])
def test_no_prompts_are_bad_usage_with_an_example(run, tmp_path, empty_file):
    file = tmp_path / "empty.jsonl"
    file.write_text("\n")
    status, out, err = run(*(["--file", file] if empty_file else []))
    assert (status, out) == (2, "")
    assert "no prompts" in err
    assert "example: cbjax generate" in err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"cbjax {__version__}\n")


def test_help_names_every_option_and_imports_no_jax():
    code = (
        "import sys, cbjax.cli\n"
        "try:\n    cbjax.cli.main(['generate', '--help'])\n"
        "except SystemExit as ended:\n    sys.exit(ended.code or ('jax' in sys.modules) * 3)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    for option in ("--model", "--file", "--chat", "--raw", "--max-new-tokens", "--dtype", "--seed", "--record"):
        assert option in result.stdout


def test_the_package_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "cbjax", "--version"], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"cbjax {__version__}\n")
