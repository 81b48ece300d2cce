// A list that the gateway sorts and sends in pages of 200.
import { useMemo, useRef, useState } from "../vendor.js";
import { get, useResource } from "./api.js";

export const PAGE_ROWS = 200;
const NONE = { path: "", rows: [], next: null, searchedFrom: null };

const nextOf = (page) => page.next ?? (page.has_more ? page.last_id : null);

// Reads `path` again every `every` milliseconds, until further pages are read: then new rows would move the others.
export function usePages(path, rowKey, { every = 10000, cursor = "before" } = {}) {
  const [more, setMore] = useState(NONE);
  const [failure, setFailure] = useState("");
  const isReading = useRef(false);
  const hasPages = more.path === path;
  const first = useResource(path, hasPages ? 0 : every);
  const latest = first.data?.data;
  const { next, searchedFrom } = hasPages ? more : { next: first.data ? nextOf(first.data) : null, searchedFrom: first.data?.searched_from ?? null };
  const rows = useMemo(() => {
    const known = new Map((latest ?? []).map((row) => [rowKey(row), row]));
    for (const row of hasPages ? more.rows : []) if (!known.has(rowKey(row))) known.set(rowKey(row), row);
    return [...known.values()];
  }, [latest, more, path]);
  const readMore = async () => {
    if (isReading.current || next === null) return;
    isReading.current = true;
    try {
      const page = await get(`${path}&${cursor}=${encodeURIComponent(next)}`);
      setMore({ path, rows: [...rows, ...page.data], next: nextOf(page), searchedFrom: page.searched_from ?? null });
      setFailure("");
    } catch (error) {
      setFailure(error.message);
    }
    isReading.current = false;
  };
  return { ...first, rows, pages: { hasMore: next !== null, searchedFrom, failure, readMore, readLatest: hasPages ? () => setMore(NONE) : null } };
}
