"""Files and uploads through the official SDKs, between tenants, in broken forms and with clients that leave."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.integration.dialects.conftest import DialectFleet
from tests.support.javascript_sdk import run_javascript
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LINES = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'
MISSING = "file-000000000000000000000000"
FORM = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE_PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nabc\r\n'
PURPOSE_PART = FORM % (b"purpose", b"user_data")
FORM_TYPE = "multipart/form-data; boundary=x"


def blobs(fleet: DialectFleet) -> list[Path]:
    """Return the files in which contents are or are being written."""
    assert fleet.config.store is not None
    folder = Path(str(fleet.config.store.url).removeprefix("sqlite:///") + ".files")
    return [path for path in folder.rglob("*") if path.is_file()]


async def post_form(
    fleet: DialectFleet, body: bytes | AsyncIterator[bytes], content_type: str = FORM_TYPE
) -> httpx2.Response:
    headers = {"authorization": f"Bearer {fleet.key}", "content-type": content_type}
    return await fleet.client.post("/v1/files", content=body, headers=headers)


async def test_openai_sdk_creates_lists_reads_and_deletes_files(fleet: DialectFleet) -> None:
    client = fleet.openai()
    files = [
        await client.files.create(
            file=(f"{number}.jsonl", LINES * number, "application/jsonl"), purpose="batch"
        )
        for number in range(3)
    ]
    kept: Any = {"anchor": "created_at", "seconds": 3600}
    note = await client.files.create(file=b"hi", purpose="user_data", expires_after=kept)
    assert note.expires_at == note.created_at + 3600
    file = files[2]
    assert (file.filename, file.bytes, file.status) == ("2.jsonl", len(LINES) * 2, "processed")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == LINES * 2
    assert (await client.files.content(files[0].id)).content == b""
    listed = [each async for each in client.files.list(purpose="batch", limit=2)]
    assert listed == files[::-1]
    assert [each async for each in client.files.list(order="asc")] == [*files, note]
    for each in (*files, note):
        assert (await client.files.delete(each.id)).deleted
    assert blobs(fleet) == []


async def test_openai_sdk_uploads_in_parts(fleet: DialectFleet) -> None:
    client, content = fleet.openai(), os.urandom(300_000)
    upload = await client.uploads.upload_file_chunked(
        file=content,
        filename="big.bin",
        bytes=len(content),
        mime_type="application/octet-stream",
        part_size=100_000,
        purpose="user_data",
    )
    assert upload.file is not None
    assert (upload.status, upload.file.bytes) == ("completed", len(content))
    assert (await client.files.content(upload.file.id)).content == content
    await client.files.delete(upload.file.id)
    pending = await client.uploads.create(
        bytes=5, filename="a", mime_type="text/plain", purpose="batch"
    )
    part = await client.uploads.parts.create(pending.id, data=b"abc")
    for parts in ([part.id], [part.id, "part_none"]):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.uploads.complete(pending.id, part_ids=parts)
        assert refused.value.code == "invalid_upload"
    assert (await client.uploads.cancel(pending.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        await client.uploads.parts.create(pending.id, data=b"de")
    assert blobs(fleet) == []


async def test_anthropic_sdk_uploads_lists_reads_and_deletes_files(fleet: DialectFleet) -> None:
    client = fleet.anthropic().beta.files
    files = [
        await client.upload(file=(f"{number}.txt", b"hello", "text/plain"), expires_in_seconds=3600)
        for number in range(3)
    ]
    file = files[0]
    assert (file.filename, file.mime_type, file.size_bytes) == ("0.txt", "text/plain", 5)
    assert file.expires_at is not None
    assert (file.expires_at - file.created_at).total_seconds() == 3600
    assert await client.retrieve_metadata(file.id) == file
    assert await (await client.download(file.id)).read() == b"hello"
    assert [each.id async for each in client.list(limit=2)] == [each.id for each in files[::-1]]
    assert {(await client.delete(each.id)).type for each in files} == {"file_deleted"}
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.retrieve_metadata(file.id)


async def test_javascript_sdks_use_files(fleet: DialectFleet) -> None:
    found = await run_javascript("files.mjs", fleet.url, fleet.key)
    file, upload = found["openai"]["file"], found["upload"]
    assert found["openai"]["text"] == '{"custom_id": "a"}\n'
    assert found["openai"]["listed"] == [file["id"]]
    assert found["openai"]["deleted"]["deleted"]
    assert (upload["status"], upload["file"]["bytes"]) == ("completed", 6)
    other = found["anthropic"]
    assert (other["text"], other["listed"]) == ("text", [other["file"]["id"]])
    assert other["file"]["mime_type"] == "text/plain"
    assert other["deleted"]["type"] == "file_deleted"


async def test_foreign_ids_are_answered_as_missing_ones(fleet: DialectFleet) -> None:
    client = fleet.openai()
    file = await client.files.create(file=b"mine", purpose="user_data")
    upload = await client.uploads.create(
        bytes=3, filename="a", mime_type="text/plain", purpose="batch"
    )
    headers = {"authorization": f"Bearer {fleet.other_key}"}
    form = {"data": ("part", b"abc")}
    verbs: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/files/{}", {}),
        ("GET", "/v1/files/{}/content", {}),
        ("DELETE", "/v1/files/{}", {}),
        ("GET", "/v1/files?after={}", {}),
        ("POST", "/v1/uploads/{}/parts", {"files": form}),
        ("POST", "/v1/uploads/{}/complete", {"json": {"part_ids": ["a"]}}),
        ("POST", "/v1/uploads/{}/cancel", {}),
    ]
    for method, path, options in verbs:
        own = upload.id if "uploads" in path else file.id
        answers = [
            await fleet.client.request(method, path.format(one), headers=headers, **options)
            for one in (own, MISSING)
        ]
        bodies = [answer.json()["error"] for answer in answers]
        assert [answer.status_code for answer in answers] == [404, 404], path
        assert bodies[0]["message"].replace(own, MISSING) == bodies[1]["message"]
    assert [each async for each in fleet.openai(fleet.other_key).files.list()] == []
    assert (await client.files.content(file.id)).content == b"mine"
    await client.files.delete(file.id)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-3", (206, b"0123", "bytes 0-3/10")),
        ("bytes=8-99", (206, b"89", "bytes 8-9/10")),
        ("bytes=7-", (206, b"789", "bytes 7-9/10")),
        ("bytes=-2", (206, b"89", "bytes 8-9/10")),
        ("bytes=-99", (206, b"0123456789", "bytes 0-9/10")),
        ("bytes=10-", (416, None, None)),
        ("bytes=-0", (416, None, None)),
        ("bytes=3-1", (200, b"0123456789", None)),
        ("bytes=0-1,4-5", (200, b"0123456789", None)),
        ("bytes=-", (200, b"0123456789", None)),
        ("lines=0-1", (200, b"0123456789", None)),
    ],
)
async def test_ranges_of_a_file(
    fleet: DialectFleet, asked: str, expected: tuple[int, bytes | None, str | None]
) -> None:
    file = await fleet.openai().files.create(file=b"0123456789", purpose="user_data")
    path = f"/v1/files/{file.id}/content"
    headers = {"authorization": f"Bearer {fleet.key}", "range": asked}
    answer = await fleet.client.get(path, headers=headers)
    status, content, content_range = expected
    assert (answer.status_code, answer.headers.get("content-range")) == (status, content_range)
    assert content is None or answer.content == content
    assert answer.headers["x-content-type-options"] == "nosniff"
    head = await fleet.client.head(path, headers=headers)
    assert (head.status_code, head.content) == (status, b"")
    await fleet.openai().files.delete(file.id)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (PURPOSE_PART + FILE_PART + b"--x--\r\n", 200, None),
        (FILE_PART + PURPOSE_PART + b"--x--", 200, None),
        (FILE_PART + PURPOSE_PART, 400, "invalid_form"),
        (FILE_PART + b"--x--", 400, "missing_required_parameter"),
        (PURPOSE_PART + b"--x--", 400, "missing_required_parameter"),
        (FILE_PART + FORM % (b"purpose", b"batch_output") + b"--x--", 400, "invalid_type"),
        (FILE_PART * 2 + PURPOSE_PART + b"--x--", 400, "invalid_form"),
        (FILE_PART + PURPOSE_PART * 30 + b"--x--", 400, "invalid_form"),
        (FORM % (b"purpose", b"y" * 5000) + FILE_PART + b"--x--", 400, "invalid_value"),
        (b"--x\r\n" + b"a: b\r\n" * 100 + b"\r\nabc\r\n--x--", 400, "invalid_form"),
        (b"no form at all", 400, "invalid_form"),
        (b"", 400, "invalid_form"),
    ],
)
async def test_broken_forms_are_refused_and_leave_nothing(
    fleet: DialectFleet, body: bytes, status: int, code: str | None
) -> None:
    answer = await post_form(fleet, body)
    assert answer.status_code == status, answer.text
    if code is None:
        await fleet.openai().files.delete(answer.json()["id"])
    else:
        assert answer.json()["error"]["code"] == code
    assert blobs(fleet) == []


async def test_other_content_types_are_refused(fleet: DialectFleet) -> None:
    for content_type in ("application/json", "multipart/form-data", FORM_TYPE + "y" * 300):
        answer = await post_form(fleet, b"{}", content_type)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


async def test_upload_that_is_cut_leaves_nothing(fleet: DialectFleet) -> None:
    has_begun = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield PURPOSE_PART + FILE_PART.removesuffix(b"\r\n") + b"x" * 500_000
        await until(lambda: any(path.stat().st_size for path in blobs(fleet)))
        has_begun.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(post_form(fleet, body()))
    await has_begun.wait()
    upload.cancel()
    await until(lambda: not blobs(fleet))
    assert [each async for each in fleet.openai().files.list()] == []


async def test_files_count_as_stored_bytes_also_while_they_arrive(fleet: DialectFleet) -> None:
    accounts = fleet.accounts
    project = accounts.project("small")
    key = accounts.key(project)
    accounts.limit(project, "stored_bytes", 100_000)
    await fleet.wait_for_key(key)
    client = fleet.openai(key)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=b"x" * 100_000, purpose="user_data")
    assert (refused.value.status_code, refused.value.code) == (413, "storage_quota_exceeded")
    results = await asyncio.gather(
        *(client.files.create(file=b"x" * 40_000, purpose="user_data") for _ in range(4)),
        return_exceptions=True,
    )
    created = [each for each in results if not isinstance(each, BaseException)]
    assert 1 <= len(created) <= 2
    for each in created:
        await client.files.delete(each.id)
    assert accounts.store.stored_bytes.read_use([project])[project].stored_bytes == 0
    with pytest.raises(openai.APIStatusError) as refused:
        await client.uploads.create(
            bytes=200_000, filename="a", mime_type="text/plain", purpose="batch"
        )
    assert refused.value.status_code == 413
