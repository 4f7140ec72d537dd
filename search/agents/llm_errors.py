"""litellm's errors, translated once, at the border: the agent knows outcomes, not exceptions.

The map is complete over `litellm.exceptions`, and a test asserts it: an error that a new litellm adds fails that test, not a campaign.
"""

from __future__ import annotations

from typing import Any

RETRIED: dict[str, str] = {
    "Timeout": "timeout",
    "RateLimitError": "rate-limited",
    "CallerCredentialRateLimitError": "rate-limited",
    "ServiceUnavailableError": "server-error",
    "BadGatewayError": "server-error",
    "InternalServerError": "server-error",
    "MidStreamFallbackError": "server-error",
    "APIError": "server-error",
    "APIConnectionError": "no-connection",
    "APIResponseValidationError": "garbage",
    "JSONSchemaValidationError": "garbage",
    "OpenAIError": "server-error",
}
"""Worth another try within the same deadline."""

FINAL: dict[str, str] = {
    "ContextWindowExceededError": "too-long",
    "AuthenticationError": "no-access",
    "CallerCredentialAuthenticationError": "no-access",
    "PermissionDeniedError": "no-access",
    "PaymentRequiredError": "no-access",
    "BudgetExceededError": "no-access",
    "NotFoundError": "not-found",
    "LiteLLMUnknownProvider": "not-found",
    "ModelNotMappedError": "not-found",
    "BadRequestError": "refused",
    "ImageFetchError": "refused",
    "VectorStoreSearchError": "refused",
    "MalformedRequestFieldError": "refused",
    "UnsupportedEndpointError": "refused",
    "EndpointNotSupportedByModelError": "refused",
    "UnprocessableEntityError": "refused",
    "RejectedRequestError": "refused",
    "ContentPolicyViolationError": "refused",
    "UnsupportedParamsError": "refused",
    "InvalidRequestError": "refused",
    "MockException": "refused",
    "GuardrailRaisedException": "refused",
    "BlockedPiiEntityError": "refused",
    "ModifyResponseException": "refused",
    "SensitiveDataRouteException": "refused",
}
"""Another try would end alike."""


def outcome_of(error: BaseException) -> tuple[str, bool]:
    """The outcome that an exception is, by the nearest class that is known, and whether another try may end otherwise."""
    for kind in type(error).__mro__:
        if kind.__name__ in RETRIED:
            return RETRIED[kind.__name__], True
        if kind.__name__ in FINAL:
            return FINAL[kind.__name__], False
    return "garbage", True


def retry_after_seconds(error: BaseException) -> float | None:
    """What the server asked to wait, when it said so in seconds."""
    response: Any = getattr(error, "response", None)
    headers: Any = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    try:
        return max(0.0, float(headers.get("retry-after")))
    except (TypeError, ValueError, AttributeError):
        return None
