"""Says in one sentence why an S3 server refuses a client, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING_LOST = "what is committed stays, and `glm46 run` continues from it"
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
UNKNOWN = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId")
OTHER_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "301")
SKEWED = ("RequestTimeTooSkewed",)


class StoreRefusedError(ValueError):
    """The server refuses who asks, or from where: no request to it succeeds until that is changed."""


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
    code = error.get("Code", "")
    if code in EXPIRED:
        raise StoreRefusedError(
            f"store {uri}: the credential has expired ({code}); {NOTHING_LOST}: give a new one "
            f"(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN) or a profile that renews itself "
            f"(AWS_PROFILE)"
        )
    if code in UNKNOWN:
        raise StoreRefusedError(
            f"store {uri}: the server does not know these credentials ({code}); {NOTHING_LOST}: correct "
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name another AWS_PROFILE"
        )
    if code in SKEWED:
        raise StoreRefusedError(
            f"store {uri}: this machine's clock differs too much from the server's ({code}); {NOTHING_LOST}: set the "
            f"clock (NTP)"
        )
    if code in OTHER_REGION:
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        refuse_other_region(uri, headers.get("x-amz-bucket-region") or error.get("Region", ""), asked)
