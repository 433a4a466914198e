"""MLflow's requests, each with a limit for the whole of it, its repetitions included."""

from __future__ import annotations

from mlflow.utils import request_utils
from requests import PreparedRequest, Response

from tasks.adapters.deadline import within

_SPARE = 4 / 3
"""Of all tries' time-outs together: room for the pauses between them."""

_Timeout = float | tuple[float | None, float | None] | None


class LimitedAdapter(request_utils.TCPKeepAliveHTTPAdapter):
    """Ends a request whose answer is not whole in the time that its tries have; what moves files takes its time."""

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: _Timeout = None,
        verify: bool | str = True,
        cert: str | tuple[str, str] | None = None,
        proxies: dict[str, str] | None = None,
    ) -> Response:
        """As requests has it.

        Raises:
            TimeoutError: no whole answer in time.
        """

        def whole() -> Response:
            response = super(LimitedAdapter, self).send(request, stream, timeout, verify, cert, proxies)
            if not stream:
                _ = response.content  # read here, within the limit, and kept
            return response

        if stream or request.method == "PUT" or not isinstance(timeout, (int, float)):
            return whole()
        return within(_SPARE * timeout * (1 + (self.max_retries.total or 0)), whole)


def limit_requests() -> None:
    """From now on the sessions that MLflow opens have this limit (it has no setting for one)."""
    request_utils.TCPKeepAliveHTTPAdapter = LimitedAdapter  # type: ignore[misc]
