"""YAML as people read it in a review: a text of several lines stays a block, and the head says what it is."""

from __future__ import annotations

from typing import Any

import yaml

from dspark_deploy.emit.workload import Workload


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as `|` blocks, where YAML can hold them so; no anchors for what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def head(form: str, load: Workload) -> list[str]:
    """The first lines of a rendered file, without a comment's mark."""
    secrets = ", ".join(load.secrets)
    return [
        f"Rendered by dspark-serve --emit {form} from the profile {load.profile.name} ({load.digest}).",
        f"It needs dspark-deploy where it runs, and these secrets, whose values are not in it: {secrets}.",
    ]


def yaml_documents(form: str, load: Workload, documents: list[dict[str, Any]]) -> str:
    """One file of YAML documents under the head."""
    comments = "".join(f"# {line}\n" for line in head(form, load))
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return comments + text
