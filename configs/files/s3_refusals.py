"""Says in one sentence why an S3 server refuses a client, and what to do: here, in executors and in ranks.

A message names the host that was refused: an executor's reaches the user through the driver.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

NOTHING_LOST = "what is committed stays, and `glm46 run` continues from it"
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
UNKNOWN = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId")
OTHER_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "301")
SKEWED = ("RequestTimeTooSkewed",)


class StoreRefusedError(ValueError):
    """The server refuses who asks, or from where: no request to it succeeds until that is changed."""


def explain_refusals(client: Any) -> None:
    """Make the refusals of a client's requests StoreRefusedError, and let what is raised after the last try at a server
    that does not answer say what to do."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    def keep_bucket(params: dict[str, Any], context: dict[str, Any], **_: object) -> None:
        context["glm46_bucket"] = params.get("Bucket", "")

    def explain(parsed: dict[str, Any], model: Any, context: dict[str, Any], **_: object) -> None:
        """An answer to HEAD has no body: another request learns what it means."""
        bucket = context.get("glm46_bucket", "")
        if model.name.startswith("Head") and parsed.get("Error", {}).get("Code") in ("400", "403"):
            try:
                client.list_objects_v2(Bucket=bucket, MaxKeys=1)
            except ClientError:
                return
        refuse_explained(f"s3://{bucket}", client.meta.region_name, parsed)

    def explain_silence(exception: Exception, context: dict[str, Any], **_: object) -> None:
        """The error keeps its type: a caller knows by it that the request may have been done."""
        if isinstance(exception, ConnectionError | HTTPClientError):
            exception.args = (
                f"s3://{context.get('glm46_bucket', '')}: the server {client.meta.endpoint_url} does not answer host "
                f"{socket.gethostname()} ({exception}); {NOTHING_LOST}: start it, or correct AWS_ENDPOINT_URL_S3",
            )

    client.meta.events.register("after-call-error.s3", explain_silence)
    client.meta.events.register("provide-client-params.s3", keep_bucket)
    client.meta.events.register("after-call.s3", explain)


def refuse_without_credentials(session: Any) -> None:
    """Raise StoreRefusedError where neither the environment nor a file nor a role gives any."""
    if session.get_credentials() is None:
        raise StoreRefusedError(
            f"host {socket.gethostname()} has no credentials for S3; {NOTHING_LOST}: give it AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY in the environment of Spark's executors, or a role (docs/cluster.md)"
        )


def refuse_other_region(uri: str, region: str, asked: str) -> None:
    """Raise StoreRefusedError where a bucket is in another region than the one that the client asks."""
    if region and region != asked:
        raise StoreRefusedError(
            f"store {uri}: its bucket is in region {region}, AWS_DEFAULT_REGION is {asked}: set AWS_DEFAULT_REGION to "
            f"{region}"
        )


def refuse_explained(uri: str, asked: str, answer: Mapping[str, Any]) -> None:
    """Raise StoreRefusedError where a server's answer says that it refuses the client; else do nothing."""
    error = answer.get("Error", {})
    code, who = error.get("Code", ""), f"{uri} refuses host {socket.gethostname()}"
    if code in EXPIRED:
        raise StoreRefusedError(
            f"{who}: the credential has expired ({code}); {NOTHING_LOST}: give a new one "
            f"(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or a profile that renews itself "
            f"(AWS_PROFILE)"
        )
    if code in UNKNOWN:
        raise StoreRefusedError(
            f"{who}: the server does not know these credentials ({code}); {NOTHING_LOST}: correct "
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name another AWS_PROFILE"
        )
    if code in SKEWED:
        raise StoreRefusedError(
            f"{who}: that host's clock differs too much from the server's ({code}); {NOTHING_LOST}: set the clock (NTP)"
        )
    if code in OTHER_REGION:
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        refuse_other_region(uri, headers.get("x-amz-bucket-region") or error.get("Region", ""), asked)
