"""Files of a repository in the order of their imports; changes and packages get their domains."""

from __future__ import annotations

import itertools
import random

import pytest

from tasks.data.repositories.import_paths import KnownPaths, imported_paths
from tasks.data.repositories.repository_order import Piece, order_files, repository_texts
from tasks.data.sources.data_directory import assign_roles
from tasks.data.sources.list_sources import list_sources
from tasks.data.sources.source_root import local_root
from tests.support.data_inputs import write_jsonl

PYTHON = {
    "src/pkg/__init__.py": "from .core import run\n",
    "src/pkg/core.py": "import os, sys\nfrom pkg.tools import (\n    load,\n    save,\n)\nfrom . import names\n",
    "src/pkg/tools.py": "import json\n",
    "src/pkg/names.py": "",
    "src/pkg/sub/deep.py": "from ..core import run\nimport pkg.names as short\n",
    "tests/test_core.py": "import pkg\nfrom pkg import core\n",
    "README.md": "import nothing\n",
}


def imports(texts: dict[str, str]) -> dict[str, set[str]]:
    known = KnownPaths(texts)
    return {path: imported_paths(path, text, known) for path, text in texts.items()}


def test_imports_of_python_are_found_in_packages_src_layouts_and_beside_scripts():
    imported = imports(PYTHON)
    assert imported["src/pkg/__init__.py"] == {"src/pkg/core.py"}
    assert imported["src/pkg/core.py"] == {"src/pkg/tools.py", "src/pkg/names.py", "src/pkg/__init__.py"}
    assert imported["src/pkg/sub/deep.py"] == {"src/pkg/core.py", "src/pkg/names.py"}
    assert imported["tests/test_core.py"] == {"src/pkg/__init__.py", "src/pkg/core.py"}
    assert imported["README.md"] == imported["src/pkg/tools.py"] == set()
    several = imports(
        {
            "backend/app/__init__.py": "",
            "backend/app/json.py": "",
            "backend/app/models.py": "import json\n",
            "backend/app/main.py": "from app import models as m, \\\n    json as j\n",
            "backend/run.py": "import tool, app.main as main\n",
            "backend/tool.py": "from .. import gone\nfrom .......... import far\n",
            "packages/one/src/one/__init__.py": "",
            "packages/one/tests/t.py": "from one import (  # the package\n  name)\nif True:\n    import tool\n",
            "app/models.py": "",
        }
    )
    assert several["backend/app/main.py"] == {"backend/app/__init__.py", "backend/app/models.py", "backend/app/json.py"}
    assert several["backend/run.py"] == {"backend/tool.py", "backend/app/main.py"}
    assert several["packages/one/tests/t.py"] == {"packages/one/src/one/__init__.py"}
    assert several["backend/app/models.py"] == several["backend/tool.py"] == set()


def test_imports_of_scripts_are_found_over_many_lines_by_require_and_through_the_names_of_built_files():
    imported = imports(
        {
            "a/main.ts": "import {\n  x,\n  y,\n} from './util';\nimport type { T } from \"../types.js\"\nexport * "
            "from './sub'\n",
            "a/util.ts": "const b = require('./b.cjs')\nconst lazy = () => import('./sub/deep')\nimport fs from 'fs'\n",
            "types.ts": "export const path = './a/main'\n",
            "a/b.cjs": "",
            "a/sub/index.tsx": "import '..'\nimport './deep.jsx'\n",
            "a/sub/deep.jsx": "import x from '.'\n",
            "a/index.js": "// import './util'\nconst s = \"import './util'\"\n",
            "index.ts": "export { a } from './a'\n",
        }
    )
    assert imported == {
        "a/main.ts": {"a/util.ts", "types.ts", "a/sub/index.tsx"},
        "a/util.ts": {"a/b.cjs", "a/sub/deep.jsx"},
        "types.ts": set(),
        "a/b.cjs": set(),
        "a/sub/index.tsx": {"a/index.js", "a/sub/deep.jsx"},
        "a/sub/deep.jsx": {"a/sub/index.tsx"},
        "a/index.js": set(),
        "index.ts": {"a/index.js"},
    }


def test_includes_of_c_are_found_beside_the_file_and_behind_include_directories():
    included = imports(
        {
            "b/m.c": '#include "../a/h.h"\n#  include <lib/api.h>\n#include <stdio.h>\n#include "deep/x.hpp"\n',
            "a/h.h": "",
            "b/inc/deep/x.hpp": "",
            "a/inc/deep/x.hpp": "",
            "include/lib/api.h": '#include "../../b/none.h"\n',
            "stdio.h": "",
        }
    )
    assert (
        included["b/m.c"] == {"a/h.h", "include/lib/api.h", "b/inc/deep/x.hpp"}
        and included["include/lib/api.h"] == set()
    )


def test_imports_of_go_rust_and_java_are_found():
    go = imports(
        {
            "cmd/main.go": 'package main\n\nimport (\n\t"x/json"\n\tstore '
            '"github.com/o/r/pkg/store"\n\t"github.com/pkg/errors"\n)\n',
            "pkg/store/a.go": 'import "k8s.io/r/util"\n',
            "pkg/store/a_test.go": "",
            "pkg/store/b.go": "",
            "json/j.go": "",
            "errors/e.go": "",
            "util/u.go": "",
        }
    )
    assert go["cmd/main.go"] == {"pkg/store/a.go", "pkg/store/b.go"} and go["pkg/store/a.go"] == {"util/u.go"}
    rust = imports(
        {
            "core/src/lib.rs": "pub mod a;\nmod b;\nuse std::io;\n",
            "core/src/a.rs": "mod inner;\nuse crate::{b::{self, C as D}, a::inner::X};\n",
            "core/src/b/mod.rs": "use super::a;\npub(crate) mod z;\n",
            "core/src/a/inner.rs": "use super::super::b::z::Z;\nuse super::*;\n",
            "core/src/b/z.rs": "use self::nothing::N;\n",
            "z.rs": "",
        }
    )
    assert rust == {
        "core/src/lib.rs": {"core/src/a.rs", "core/src/b/mod.rs"},
        "core/src/a.rs": {"core/src/a/inner.rs", "core/src/b/mod.rs"},
        "core/src/b/mod.rs": {"core/src/a.rs", "core/src/b/z.rs"},
        "core/src/a/inner.rs": {"core/src/b/z.rs"},
        "core/src/b/z.rs": set(),
        "z.rs": set(),
    }
    java = imports(
        {
            "app/src/main/java/org/x/Main.java": "import org.x.util.Text;\nimport static org.x.Names.ALL;\nimport "
            "org.x.all.*;\nimport j.X",
            "app/src/main/java/org/x/util/Text.java": "",
            "app/src/main/java/org/x/Names.java": "",
            "app/src/main/java/org/x/all/A.java": "",
            "app/src/main/java/org/x/all/B.kt": "import org.x.util.Text as T\n",
            "X.java": "",
            "o/S.scala": "import org.x.{Names, Main}\nimport org.x.all._\n",
        }
    )
    root = "app/src/main/java/org/x/"
    assert java[f"{root}Main.java"] == {
        root + name for name in ("util/Text.java", "Names.java", "all/A.java", "all/B.kt")
    }
    assert java[f"{root}all/B.kt"] == {f"{root}util/Text.java"}
    assert java["o/S.scala"] == {root + name for name in ("Names.java", "Main.java", "all/A.java", "all/B.kt")}


@pytest.mark.parametrize("seed", range(5))
def test_without_circles_every_file_stands_behind_what_it_imports_whatever_the_given_order(seed):
    draw = random.Random(seed)
    paths = [f"m{number}.py" for number in range(12)]
    ranks = draw.sample(range(12), 12)
    texts = {
        path: "".join(
            f"import m{other}\n" for other in range(12) if ranks[other] < ranks[number] and draw.random() < 0.3
        )
        for number, path in enumerate(paths)
    }
    order = order_files(texts)
    assert sorted(order) == sorted(paths)
    for path, text in texts.items():
        for used in imported_paths(path, text, KnownPaths(texts)):
            assert order.index(used) < order.index(path)
    assert order_files(dict(reversed(texts.items()))) == order


def test_a_circle_is_cut_and_every_file_stays_once():
    texts = {"a.py": "import b\n", "b.py": "import c\n", "c.py": "import a\n", "d.py": "import a\n"}
    assert order_files(texts) == ["c.py", "b.py", "a.py", "d.py"]


def pieces_of(path: str, *texts: str, missing: int | None = None) -> list[Piece]:
    starts = itertools.accumulate((len(text) for text in texts), initial=0)
    pieces = [Piece(f"{path}{start}", path, 0, start, path, text) for start, text in zip(starts, texts, strict=False)]
    return [piece for number, piece in enumerate(pieces) if number != missing]


def test_parts_of_a_file_come_together_and_a_missing_one_is_marked():
    (whole,) = repository_texts(
        [*pieces_of("b.py", "one\n", "two\n", "three\n"), *pieces_of("a.py", "import b\n")], 1000
    )
    assert whole[0] == "# file: b.py\none\ntwo\nthree\n\n# file: a.py\nimport b\n\n"
    (holed,) = repository_texts(pieces_of("b.c", "one\n", "two\n", "three\n", missing=1), 1000)
    assert holed[0] == "// file: b.c\none\n// file: b.c\nthree\n\n"
    for text, members in (whole, holed):
        assert sum(size for _, size in members) == len(text)


@pytest.mark.parametrize("max_chars", [1, 40, 100, 10_000])
def test_a_long_repository_is_cut_between_files(max_chars):
    pieces = [piece for number in range(9) for piece in pieces_of(f"f{number}.py", "x" * 10, "y" * 5)]
    texts = list(repository_texts(pieces, max_chars))
    (whole,) = repository_texts(pieces, 10**9)
    assert "".join(text for text, _ in texts) == whole[0]
    assert all(len(text) <= max_chars or len(members) == 2 for text, members in texts)
    assert [piece for _, members in texts for piece, _ in members] == [piece for piece, _ in whole[1]]


def test_changes_are_commits_and_files_of_a_package_know_it(tmp_path):
    write_jsonl(tmp_path / "changes.jsonl", [{"repo": "x/y", "message": "Fix", "patch": "--- a\n+++ b\n"}])
    (tmp_path / "lib" / "inner").mkdir(parents=True)
    (tmp_path / "lib" / "inner" / "a.py").write_text("x = 1\n")
    (tmp_path / "alone.py").write_text("x = 1\n")
    (tmp_path / "0001-fix.patch").write_text("From 1\n")
    files = {file.name: file for file in list_sources(tmp_path).files}
    assert {name: file.domain for name, file in files.items()} == {
        "changes.jsonl": "web",
        "lib/inner/a.py": "code",
        "alone.py": "code",
        "0001-fix.patch": "commit",
    }
    assert (files["lib/inner/a.py"].repository, files["lib/inner/a.py"].repository_path) == ("lib", "lib/inner/a.py")
    assert files["alone.py"].repository == files["0001-fix.patch"].repository == ""
    (tmp_path / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: '*.jsonl', role: pretrain, domain: code, format: commits, text: [message, "
        "patch]}\n"
    )
    ((_, entry),) = assign_roles(local_root(tmp_path))
    assert entry.domain == "commit"


def test_the_embedded_library_has_its_packages_as_repositories():
    files = {file.name: file for file in list_sources(None).files}
    assert (files["python/json/decoder.py"].repository, files["python/json/decoder.py"].repository_path) == (
        "python/json",
        "json/decoder.py",
    )
    assert files["python/abc.py"].repository == ""
