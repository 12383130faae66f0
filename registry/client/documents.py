"""Immutable documents: bundles, policies, suites, references."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from registry.client.transport import Transport, seen
from schemas.alias import (
    Alias,
    AliasAt,
    AliasChange,
    AliasDelete,
    AliasPattern,
    AliasPatternRemove,
    AliasPatterns,
    AliasPatternSet,
    AliasProtect,
    AliasSet,
    PatternMovers,
)
from schemas.api import Act, BundleDeleted, QuarantineState, Registered
from schemas.boots import Boot
from schemas.common import Document, canonical_json
from schemas.comparison import BundleDiff, BundleImpact
from schemas.lock import Lock
from schemas.problems import NotFound


class Documents:
    """Documents of one kind, named by digest."""

    path, noun = "", ""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def register(self, document: Document | bytes) -> tuple[Registered, bool]:
        """Register a document, and tell whether it is new. Registering it twice changes nothing.

        Args:
            document: or its JSON, exactly as someone wrote it.

        Raises:
            InvalidDocument: `errors` lists each place by JSON Pointer.
            BlobsMissing: a bundle's files have not been uploaded.
            SuiteMissing: a policy names suites that are not registered.
            PolicyTooWeak: a policy asks for fewer samples than it can decide with.
            Conflict: another document holds the place.
        """
        raw = document if isinstance(document, bytes) else document.canonical()
        answer = self._transport.send("POST", self.path, body=raw)
        return self._transport.parse(Registered, answer), answer.status_code == 201

    def create(self, document: Document | bytes) -> Registered:
        """Register a document; `register` also tells whether it is new."""
        return self.register(document)[0]

    def get(self, digest: str) -> Registered:
        """Return a document by its digest. Raises NotFound."""
        return self._transport.get(Registered, f"{self.path}/{digest}")

    def list(self, name: str | None = None) -> Iterator[Registered]:
        """List documents, newest first, without their bodies; only those of a family when a name is given."""
        return self._transport.pages(Registered, self.path, {"name": name})


class Bundles(Documents):
    """Bundles."""

    path, noun = "/v1/bundles", "bundle"

    def register(self, document: Document | bytes, locks: Sequence[Lock] | None = None) -> tuple[Registered, bool]:
        """Register a bundle, and tell whether it is new. Registering it twice changes nothing.

        Args:
            document: or its JSON, exactly as someone wrote it.
            locks: how its sources were resolved; kept in its record, as it was registered first.

        Raises:
            InvalidDocument: `errors` lists each place by JSON Pointer.
            BlobsMissing: its files have not been uploaded.
        """
        if not locks:
            return super().register(document)
        raw = document if isinstance(document, bytes) else document.canonical()
        listed = canonical_json([one.model_dump(mode="json", exclude_none=True) for one in locks])
        return super().register(b'{"bundle":' + raw + b',"locks":' + listed + b"}")

    def delete(self, digest: str, reason: str) -> BundleDeleted:
        """Delete a bundle that nothing needs. The document stays in evidence; its files go after a time of grace.

        Raises:
            Conflict: something needs it; `users` says what.
            NotFound, NotPermitted.
        """
        return self._transport.post(BundleDeleted, f"{self.path}/{digest}/deletions", Act(reason=reason))

    def quarantine(self, digest: str, reason: str) -> QuarantineState:
        """Let nothing go on with a bundle until a person lifts this. Raises NotFound, NotPermitted."""
        return self._transport.post(QuarantineState, f"{self.path}/{digest}/quarantine", Act(reason=reason))

    def named(self, alias: str) -> str:
        """Return the digest that an alias names now; what is asked for next should name that. Raises NotFound."""
        found = self._transport.get(Alias, f"/v1/aliases/{alias}")
        if found.bundle is None:
            raise NotFound(f"the alias {alias} names nothing")
        return found.bundle

    def lift(self, digest: str, reason: str, *, if_match: str | None = None) -> QuarantineState:
        """Let a bundle be used again, whatever it is quarantined for.

        Args:
            digest: of the bundle.
            reason: why; kept in evidence.
            if_match: the quarantine's `version`, as it was seen.

        Raises:
            Conflict: it is not quarantined.
            StaleEdit: it is quarantined for something else by now.
            NotFound, NotPermitted.
        """
        path = f"{self.path}/{digest}/quarantine/lift"
        answer = self._transport.send("POST", path, body=Act(reason=reason), headers=seen(if_match))
        return self._transport.parse(QuarantineState, answer)

    def list(
        self,
        name: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        quarantined: bool | None = None,
        file: str | None = None,
    ) -> Iterator[Registered]:
        """List bundles, newest first, without their bodies.

        Args:
            name: only of this family.
            labels: only with all of these.
            quarantined: only those that are, or are not.
            file: only those made of a file with this digest.

        Raises:
            InvalidDocument: a label is not one that a bundle may have.
        """
        asked = [f"{label}={value}" for label, value in (labels or {}).items()]
        is_quarantined = None if quarantined is None else str(quarantined).lower()
        parameters = {"name": name, "label": asked, "quarantined": is_quarantined, "file": file}
        return self._transport.pages(Registered, self.path, parameters)

    def boots(self, digest: str) -> Iterator[Boot]:
        """Tell what the boots of a bundle took, by its newest jobs, newest first. Raises NotFound."""
        return self._transport.pages(Boot, f"{self.path}/{digest}/boots", {})

    def diff(self, first: str, second: str) -> BundleDiff:
        """Compare two bundles part by part. Raises NotFound."""
        return self._transport.get(BundleDiff, f"{self.path}/{first}/diff/{second}")

    def impact(self, first: str, second: str, *, policy: str | None = None) -> BundleImpact:
        """Say which gates must run again for the second bundle, given evidence of the first; it lets nothing pass.

        Args:
            first: bundle with evidence, such as the accepted one.
            second: bundle that shall be released.
            policy: digest; only its gates, by its rules. Otherwise every gate that there is.

        Raises:
            NotFound.
        """
        return self._transport.get(BundleImpact, f"{self.path}/{first}/impact/{second}", {"policy": policy})


class Policies(Documents):
    """Policies."""

    path, noun = "/v1/policies", "policy"


class Suites(Documents):
    """Golden and load suites."""

    path, noun = "/v1/suites", "suite"


class References:
    """Golden references; they are recorded by runs, not registered."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, digest: str) -> Registered:
        """Return a reference by its digest. Raises NotFound."""
        return self._transport.get(Registered, f"/v1/references/{digest}")


class Aliases:
    """Movable names of bundles, and patterns that protect them.

    An act with `if_match`, the `generation` of the alias or pattern, is done only when nothing changed.
    """

    path = "/v1/aliases"
    patterns_path = "/v1/alias-patterns"

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def set(
        self, name: str, bundle: str, reason: str, *, expected: str | None = None, if_match: str | None = None
    ) -> Alias:
        """Make an alias; or move it, when it names `expected`, or is of the generation `if_match`.

        Raises:
            Conflict: it names something else; `bundle` says what.
            StaleEdit, BundleQuarantined, NotFound, NotPermitted.
        """
        return self._act("PUT", name, AliasSet(bundle=bundle, expected=expected, reason=reason), if_match)

    def get(self, name: str) -> Alias:
        """Return an alias. Raises NotFound."""
        return self._transport.get(Alias, f"{self.path}/{name}")

    def list(self, *, bundle: str | None = None) -> Iterator[Alias]:
        """List aliases, newest first; only those of a bundle when its digest is given."""
        return self._transport.pages(Alias, self.path, {"bundle": bundle})

    def history(self, name: str) -> Iterator[AliasChange]:
        """List the acts on an alias, newest first, also on one that is deleted. Raises NotFound."""
        return self._transport.pages(AliasChange, f"{self.path}/{name}/history")

    def at(self, name: str, at: datetime) -> AliasAt:
        """Return what an alias named at an aware instant, by its evidence. Raises NotFound, InvalidDocument."""
        return self._transport.get(AliasAt, f"{self.path}/{name}/named", {"at": at.isoformat()})

    def delete(self, name: str, reason: str, *, if_match: str | None = None) -> Alias:
        """Take an alias away; its history stays. Raises NotFound, StaleEdit, NotPermitted."""
        return self._act("POST", f"{name}/deletions", AliasDelete(reason=reason), if_match)

    def protect(self, name: str, reason: str, *, is_protected: bool = True, if_match: str | None = None) -> Alias:
        """Let only managers move an alias, or everybody who proposes again.

        Raises:
            BundleQuarantined, NotFound, StaleEdit, NotPermitted.
        """
        body = AliasProtect(is_protected=is_protected, reason=reason)
        return self._act("POST", f"{name}/protections", body, if_match)

    def patterns(self) -> Sequence[AliasPattern]:
        """Return the patterns that protect aliases by their names, sorted."""
        return self._transport.get(AliasPatterns, self.patterns_path).items

    def protect_pattern(
        self,
        pattern: str,
        movers: PatternMovers,
        reason: str,
        *,
        expected: PatternMovers | None = None,
        if_match: str | None = None,
    ) -> AliasPattern:
        """Let only whoever has a role, or more, move the aliases whose names fit a pattern, made or not.

        A pattern that is there is changed when it is for the role `expected`, or of the generation `if_match`.

        Raises:
            Conflict: it is for another role (`movers` says which), or there are too many patterns.
            StaleEdit, BundleQuarantined, NotPermitted.
        """
        body = AliasPatternSet(pattern=pattern, movers=movers, expected=expected, reason=reason)
        return self._transport.post(AliasPattern, self.patterns_path, body, if_match=if_match)

    def remove_pattern(self, pattern: str, reason: str, *, if_match: str | None = None) -> AliasPattern:
        """Let a pattern protect nothing any more. Raises NotFound, StaleEdit, NotPermitted."""
        body = AliasPatternRemove(pattern=pattern, reason=reason)
        return self._transport.post(AliasPattern, f"{self.patterns_path}/removals", body, if_match=if_match)

    def _act(self, method: str, where: str, body: AliasSet | AliasDelete | AliasProtect, if_match: str | None) -> Alias:
        answer = self._transport.send(method, f"{self.path}/{where}", body=body, headers=seen(if_match))
        return self._transport.parse(Alias, answer)
