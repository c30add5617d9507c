import pytest

from multilora_engine.tritonserver.log import ServerLog

STAMP = "1121 09:54:40.730727 5843"


def test_loaded_models_are_collected_in_order() -> None:
    log = ServerLog()
    log.feed(f"I{STAMP} model_lifecycle.cc:839] \"successfully loaded 'postprocessing'\"")
    log.feed(f"I{STAMP} model_lifecycle.cc:839] \"successfully loaded 'generation'\"")
    assert log.loaded == ["postprocessing", "generation"]


@pytest.mark.parametrize(
    "line",
    [
        f'E{STAMP} server.cc:241] "CudaDriverHelper has not been initialized."',
        "Error: Failed to initialize NVML",
        f"I{STAMP} server.cc:604] ",
        "+------------------+------+",
        "| Repository Agent | Path |",
        "",
    ],
)
def test_noise_is_neither_shown_nor_taken_for_the_reason(line: str) -> None:
    log = ServerLog()
    assert log.feed(f'E{STAMP} http_server.cc:1] "the reason"')
    assert not log.feed(line)
    assert log.failure == "the reason"


def test_compiling_is_told_as_long_as_it_takes() -> None:
    log = ServerLog()
    for line, is_compiling in [
        (f'I{STAMP} model_lifecycle.cc:472] "loading: generation:1"', False),
        ("INFO multilora_kernels.cpu.build: Compiling the CPU kernels into /cache: once per machine", True),
        ("INFO multilora_engine: something else", True),
        ("INFO multilora_kernels.cpu.build: Compiled the CPU kernels in 85 s", False),
    ]:
        log.feed(line)
        assert log.is_compiling is is_compiling


def test_a_model_that_died_is_told_with_the_last_lines_of_its_process() -> None:
    log = ServerLog()
    for line in ("terminate called after throwing an instance of 'std::invalid_argument'", "  what():  stol"):
        log.feed(line)
    log.feed(f"E{STAMP} model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: Stub 'a' is not healthy.\"")
    log.feed("error: creating server: Internal - failed to load all models")
    assert log.failure.startswith("a: Stub 'a' is not healthy. It wrote: terminate called after ")
    assert log.failure.endswith(" / what():  stol")


def test_the_servers_last_word_does_not_hide_the_error_before_it() -> None:
    log = ServerLog()
    log.feed(f'E{STAMP} model_repository_manager.cc:1460] "Poll failed for model directory a: no such backend"')
    log.feed("error: creating server: Internal - failed to load all models")
    assert log.failure == "Poll failed for model directory a: no such backend"


def test_a_failed_load_is_the_reason_without_its_python_trace() -> None:
    log = ServerLog()
    log.feed(
        f"E{STAMP} model_lifecycle.cc:642] \"failed to load 'generation' version 1: Internal: ConfigError: say "
        '\\"hi\\"\\nand bye\\n\\nAt:\\n  /repository/generation/1/model.py(7): initialize\\n"'
    )
    log.feed("error: creating server: Internal - failed to load all models")
    assert log.failure == 'generation: ConfigError: say "hi"\nand bye'


def test_the_failure_of_the_engines_model_explains_those_that_wait_for_it() -> None:
    log = ServerLog()
    for model, reason in [("generation_unary", "no engine"), ("generation", "no config.json"), ("ensemble", "no step")]:
        log.feed(f"E{STAMP} model_lifecycle.cc:642] \"failed to load '{model}' version 1: Internal: {reason}\"")
    assert log.failure == "generation: no config.json"


def test_without_any_error_the_last_line_is_the_reason() -> None:
    log = ServerLog()
    assert log.failure == "it wrote no log"
    log.feed("tritonserver: error while loading shared libraries: libdcgm.so.3")
    assert log.failure == "tritonserver: error while loading shared libraries: libdcgm.so.3"
