// Answers of the server.

const PATIENCE_MS = 30_000;

export class ApiError extends Error {
  /** @param {string} code of the server, or "offline", "slow" */
  constructor(message, code, status = 0) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

/** A path with its query; lists repeat a parameter, null and "" are omitted. */
export function address(path, query = {}) {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat())
      if (one !== null && one !== undefined && one !== "") params.append(name, String(one));
  }
  const text = params.toString();
  return text ? `${path}?${text}` : path;
}

/**
 * The JSON of an address.
 * @param {AbortSignal} [signal] of a page that is left
 */
export async function get(path, query = {}, signal = undefined) {
  const slow = AbortSignal.timeout(PATIENCE_MS);
  let response;
  try {
    response = await fetch(address(path, query), {
      signal: signal ? AbortSignal.any([signal, slow]) : slow,
      credentials: "same-origin",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (slow.aborted) throw new ApiError(`no answer within ${PATIENCE_MS / 1000} s`, "slow");
    throw new ApiError("the dashboard's server does not answer", "offline");
  }
  const answer = await response.json().catch(() => null);
  if (response.ok && answer !== null) return answer;
  const said = answer?.error;
  const error = new ApiError(said?.message ?? `status ${response.status}`, said?.code ?? "failed", response.status);
  if (error.code === "token_needed") document.dispatchEvent(new CustomEvent("token-needed"));
  throw error;
}

export function isAbort(error) {
  return error?.name === "AbortError";
}
