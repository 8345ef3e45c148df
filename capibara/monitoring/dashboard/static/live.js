// Server-sent events, and whether they arrive.

const KINDS = ["hello", "runs", "update", "reload", "alert", "resync"];
const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 20_000;
const HIDDEN_MS = 20_000;

/** Dispatches the server's events, and "state" with "connecting", "live", "paused" or "lost". */
export class Live extends EventTarget {
  constructor() {
    super();
    this.state = "connecting";
    this.skew_s = 0;
    this.lostAt = null;
    this._wait_ms = FIRST_WAIT_MS;
    this._source = null;
    this._timer = 0;
    addEventListener("online", () => this.state === "lost" && this.connect());
    // A browser has six connections to a server: pages that nobody sees must not hold them.
    addEventListener("pagehide", () => this.pause());
    addEventListener("pageshow", (event) => event.persisted && this.connect());
    document.addEventListener("visibilitychange", () => {
      clearTimeout(this._hidden);
      if (document.hidden) this._hidden = setTimeout(() => this.pause(), HIDDEN_MS);
      else if (this.state === "paused") this.connect();
    });
  }

  /** Gives the connection back; what is shown stays as it is. */
  pause() {
    clearTimeout(this._timer);
    this._source?.close();
    this._source = null;
    this._say("paused");
  }

  /** The server's time, s. */
  now() {
    return Date.now() / 1000 + this.skew_s;
  }

  connect() {
    clearTimeout(this._timer);
    this._source?.close();
    const source = new EventSource("/api/events");
    this._source = source;
    for (const kind of KINDS) source.addEventListener(kind, (event) => this._arrived(kind, event.data));
    source.onerror = () => this._failed(source);
  }

  _arrived(kind, text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch {
      return;
    }
    if (kind === "hello") {
      this.skew_s = data.now - Date.now() / 1000;
      this._wait_ms = FIRST_WAIT_MS;
    }
    const wasLost = this.state === "lost" || this.state === "paused";
    if (this.state !== "live") this._say("live");
    this.dispatchEvent(new CustomEvent(kind, { detail: data }));
    if (kind === "hello" && wasLost) this.dispatchEvent(new CustomEvent("resync", { detail: {} }));
  }

  _failed(source) {
    if (source !== this._source) return;
    if (this.state !== "lost") {
      this.lostAt = Date.now() / 1000;
      this._say("lost");
    }
    // The browser tries again by itself only while the source is connecting; and then it waits as it likes.
    source.close();
    this._timer = setTimeout(() => this.connect(), this._wait_ms);
    this._wait_ms = Math.min(LONGEST_WAIT_MS, 1.7 * this._wait_ms);
  }

  _say(state) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
