// The libraries of the console as one module. `build.sh` bundles it into src/argosy/gateway/console/static/vendor.js.
import { h, render } from "preact";
import htm from "htm";

export { render };
export { useEffect, useMemo, useRef, useState } from "preact/hooks";
export { batch, computed, effect, signal, untracked } from "@preact/signals";
export { default as uPlot } from "uplot";
export const html = htm.bind(h);
