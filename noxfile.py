"""`nox`: tests on every Python that is found, on the oldest versions that pyproject.toml allows, and from the wheel."""

import tomllib
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False
PYTEST = ("python", "-m", "pytest", "-n", "auto", "--dist", "loadfile")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """Everything, on the newest versions of all dependencies."""
    session.install("-e", ".[all,dev]")
    session.run(*PYTEST, *session.posargs, env=ONE_THREAD)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """Everything, on the oldest version of each dependency that the package claims to work with."""
    session.install("-e", ".[all,dev]", "-c", str(lowest(Path(session.create_tmp()))))
    session.run(*PYTEST, *session.posargs, env=ONE_THREAD)


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("extra", ["", "torch", "jax"])
def wheel(session: nox.Session, extra: str) -> None:
    """The built wheel in an environment of its own: what can be imported, and that the suite passes."""
    folder = session.create_tmp()
    session.install("build")
    session.run("python", "-m", "build", "--wheel", "--outdir", folder, str(Path.cwd()))
    built = max(Path(folder).glob("*.whl"), key=lambda path: path.stat().st_mtime)
    session.install(f"{built}[{extra}]" if extra else f"{built}[tools]")
    session.chdir(folder)
    session.run("python", "-m", "conformance", "run", "--case", "attention")


def lowest(folder: Path) -> Path:
    """pyproject.toml's `>=` as `==`, for what the package itself needs to run."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["tools"], *extras["torch"], *extras["jax"]]
    lines = [line.replace(">=", "==") for line in wanted if ">=" in line and not line.startswith("attention")]
    lines.append("pyparsing<3.3")  # newer ones warn of names that the oldest matplotlib uses, and a warning is an error
    path = folder / "oldest.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
