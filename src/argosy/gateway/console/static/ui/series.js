// Time series of the gateway as columns.
import { useMemo } from "../vendor.js";
import { query, useResource } from "../core/api.js";

export const RANGES = [
  { id: "15m", label: "15 min", seconds: 900, step: 1 },
  { id: "1h", label: "1 h", seconds: 3600, step: 10 },
  { id: "6h", label: "6 h", seconds: 21600, step: 10 },
  { id: "24h", label: "24 h", seconds: 86400, step: 60 },
  { id: "7d", label: "7 d", seconds: 604800, step: 600 },
  { id: "30d", label: "30 d", seconds: 2592000, step: 3600 },
];

// Reads metrics of a scope over a range that ends now. A gateway without series has none to show, which is no failure.
export function useSeries(scope, metrics, range) {
  const { seconds, step } = RANGES.find(({ id }) => id === range) ?? RANGES[0];
  const build = () => {
    const until = Math.floor(Date.now() / 1000 / step) * step;
    return query("admin/series", { scope, metrics: metrics.join(","), from: until - seconds, to: until, step });
  };
  const resource = useResource(`series/${scope}/${range}`, Math.min(step, 60) * 1000 + 1000, build);
  const data = useMemo(() => {
    const answer = resource.data;
    if (!answer) return answer;
    const length = Math.max(0, ...Object.values(answer.metrics).map((values) => values.length));
    return { ...answer, times: Array.from({ length }, (_, index) => answer.start + index * answer.step_s) };
  }, [resource.data]);
  if (resource.error?.status === 404) return { ...resource, error: null, data: { times: [], metrics: {} } };
  return { ...resource, data };
}
