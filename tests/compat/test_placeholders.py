"""The import placeholders, each checked in a process of its own."""

import subprocess
import sys
from pathlib import Path


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_placeholder_of_an_absent_package_imports_with_any_submodule() -> None:
    out = _run(
        "from megarl.compat import placeholders\n"
        "if 'triton' not in placeholders.install(['triton']): print('ok'); raise SystemExit\n"
        "import triton, triton.language as tl\n"
        "from triton.runtime.driver import Anything\n"
        "@triton.jit\n"
        "def f(x): return x + 1\n"
        "@triton.jit(debug=True)\n"
        "def g(x): return x + 2\n"
        "assert (f(1), g(1), triton.cdiv(5, 2)) == (2, 3, 3)\n"
        "assert tl.constexpr(4).value == 4\n"
        "print('ok')"
    )
    assert out == "ok"


def test_placeholder_of_an_installed_package_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("REAL = True\n")
    out = _run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megarl.compat import placeholders\n"
        "print(placeholders.install(['sgl_kernel']))\n"
        "import sgl_kernel; print(sgl_kernel.REAL)"
    )
    assert out.split("\n") == ["()", "True"]


def test_placeholder_of_a_package_that_was_not_asked_for_is_not_made() -> None:
    out = _run(
        "from megarl.compat import placeholders\n"
        "import importlib.util\n"
        "placeholders.install(['triton'])\n"
        "print(importlib.util.find_spec('sgl_kernel'))"
    )
    assert out == "None"


def test_transformers_does_not_believe_in_a_placeholder() -> None:
    out = _run(
        "from megarl.compat import placeholders\n"
        "if not placeholders.install(['torchvision']): print(False); raise SystemExit\n"
        "from transformers.utils import import_utils\n"
        "print(import_utils.is_torchvision_available())"
    )
    assert out == "False"
