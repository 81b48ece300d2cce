// Time series of the gateway as columns, over the range that the address names.
import { useMemo } from "../vendor.js";
import { query, useResource } from "../core/api.js";
import { route } from "../core/router.js";

export const RANGES = [
  { id: "15m", label: "15 min", seconds: 900, step: 1 },
  { id: "1h", label: "1 h", seconds: 3600, step: 10 },
  { id: "6h", label: "6 h", seconds: 21600, step: 10 },
  { id: "24h", label: "24 h", seconds: 86400, step: 60 },
  { id: "7d", label: "7 d", seconds: 604800, step: 600 },
  { id: "30d", label: "30 d", seconds: 2592000, step: 3600 },
];
const MIN_SECONDS = 10;

// A range of RANGES, which ends now, or the one from `from` to `to`, in seconds since the epoch.
export function currentRange(usual = "15m") {
  const { query: { range, from, to } } = route.value;
  const known = RANGES.find(({ id }) => id === (range ?? usual)) ?? RANGES[0];
  const start = Number(from), end = Number(to);
  return from && to && end - start >= MIN_SECONDS ? { ...known, start, end } : known;
}

// Reads metrics of a scope over the range in the address, or the usual one. A gateway without series has none to show,
// which is no failure.
export function useSeries(scope, metrics, usual) {
  const { id, seconds, step, start, end } = currentRange(usual);
  const names = metrics.join(",");
  const build = () => {
    if (start) return query("admin/series", { scope, metrics: names, from: start, to: end });
    const until = Math.floor(Date.now() / 1000 / step) * step;
    return query("admin/series", { scope, metrics: names, from: until - seconds, to: until, step });
  };
  const isPast = start && end < Date.now() / 1000 - 60;
  const resource = useResource(`series/${scope}/${names}/${start ? `${start}-${end}` : id}`, isPast ? 0 : Math.min(step, 60) * 1000 + 1000, build);
  const data = useMemo(() => {
    const answer = resource.data;
    if (!answer) return answer;
    const length = Math.max(0, ...Object.values(answer.metrics).map((values) => values.length));
    return { ...answer, times: Array.from({ length }, (_, index) => answer.start + index * answer.step_s) };
  }, [resource.data]);
  if (resource.error?.status === 404) return { ...resource, error: null, data: { times: [], metrics: {} } };
  return { ...resource, data };
}
