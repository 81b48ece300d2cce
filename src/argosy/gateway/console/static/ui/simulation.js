// Runs of simulations, which a new one, the button or the end of the screen cancels.
import { html, useEffect, useRef, useState } from "../vendor.js";
import { call } from "../core/api.js";
import { visible } from "../core/format.js";

export function useRun() {
  const [state, setState] = useState({ isRunning: false, data: null, error: "" });
  const controller = useRef(null);
  const cancel = () => controller.current?.abort();
  useEffect(() => cancel, []);
  const run = async (path, body) => {
    cancel();
    const own = (controller.current = new AbortController());
    setState((before) => ({ ...before, isRunning: true, error: "" }));
    try {
      const data = await (await call("POST", path, body, own.signal)).json();
      if (controller.current === own) setState({ isRunning: false, data, error: "" });
    } catch (error) {
      if (controller.current === own) setState((before) => ({ ...before, isRunning: false, error: error.name === "AbortError" ? "" : error.message }));
    }
  };
  return { ...state, run, cancel };
}

export const RunState = ({ of: run }) => html`${run.isRunning ? html`<p class="note" role="status">Simulating. <button type="button" class="link" onClick=${run.cancel}>Cancel</button></p>` : null}
  ${run.error ? html`<p class="failure" role="alert">${visible(run.error)}</p>` : null}`;
