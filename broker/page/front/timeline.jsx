// Pending messages by due time as bars: a picture, and the same as a table for who reads rather than sees.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { count, number, short, topicName } from "./format.js";
import { Table } from "./parts.jsx";

const MINUTE = 60_000, HOUR = 60 * MINUTE, DAY = 24 * HOUR;

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const month = new Intl.DateTimeFormat("en-GB", { month: "short", year: "numeric" });

function midnight() {
  return new Date().setHours(0, 0, 0, 0);
}

/** By name: how long a bar is, how many, when the first begins, and how its time is written. */
export const RANGES = {
  hour: { title: "Next hour", step: MINUTE, bars: 60, start: () => Date.now() - (Date.now() % MINUTE), label: clock },
  day: { title: "Next 24 hours", step: HOUR, bars: 24, start: () => Date.now() - (Date.now() % HOUR), label: clock },
  month: { title: "Next 31 days", step: DAY, bars: 31, start: midnight, label: date },
  year: { title: "Next 12 months", step: 7 * DAY, bars: 53, start: midnight, label: date },
};

/** The first moment of a range; it moves on as bars pass. */
function useStart(range) {
  const { start, step } = RANGES[range];
  const [found, setFound] = useState(start);
  useEffect(() => {
    const first = start();
    setFound(first);
    const timer = setInterval(() => setFound(start()), Math.min(step, MINUTE) / 4);
    return () => clearInterval(timer);
  }, [range]);
  return found;
}

/** The question for a range: of one topic, of all together, or of those that have most apart. */
export function useTimeline(range, topic, apart) {
  const start = useStart(range);
  const { step, bars } = RANGES[range];
  const given = { start_ms: start, step_ms: step, bars };
  return useMemo(() => (apart ? ["timeline_by_topic", given] : ["timeline", { ...given, ...(topic && { topic }) }]), [range, start, topic, apart]);
}

/** Parts that stand on each other, by name: of an answer of either kind. */
function partsOf(result) {
  if (!result) return [];
  if (Array.isArray(result)) return [{ key: "pending", title: "Pending", counts: result }];
  const parts = result.topics.map((name, at) => ({ key: name, title: topicName(name), counts: result.counts[at] }));
  const others = { key: "others", title: "Other topics", counts: result.rest };
  return result.rest.some(Boolean) || !parts.length ? [...parts, others] : parts;
}

/** A colour of the style sheet as a canvas takes it. */
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const SHADES = 8;

/** By topic the number of its colour, the same in all pictures; of those that are in none: the others' grey. */
export function useShades(answers) {
  const names = [...new Set(answers.toReversed().flatMap((answer) => answer?.result?.topics ?? []))];
  return useMemo(() => ({ pending: 0, ...Object.fromEntries(names.map((name, at) => [name, at % SHADES])) }), [names.join(" ")]);
}

function options(width, height, label, numbers) {
  const ink = colour("--quiet"), line = colour("--line"), shades = numbers.map((each) => colour(`--s${each}`)).reverse();
  const marks = Math.max(2, Math.floor(width / 75)); // as many times as have room below
  const splits = (plot) => {
    const times = plot.data[0], every = Math.ceil(times.length / marks);
    return times.filter((_, at) => at % every === 0);
  };
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width, height,
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 20, 0, 0],
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high, 4) * 1.08] } },
    axes: [
      { ...axis, grid: { show: false }, size: 26, splits, values: (_, at) => at.map((each) => label.format(each)) },
      { ...axis, size: 46, space: 28, incrs: [1, 2, 5, 10, 20, 50, 1e2, 2e2, 5e2, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7],
        values: (_, at) => at.map((each) => short(each)) },
    ],
    // The highest sum is drawn first, and the smaller ones over it.
    series: [{}, ...shades.map((shade) => ({
      fill: shade, stroke: shade, width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.82, 40], align: 1, radius: shades.length > 1 ? 0 : 0.12 }),
    }))],
  };
}

export function Timeline({ range, question, answer, shades, height = 150 }) {
  const place = useRef(null), plot = useRef(null), shape = useRef("");
  const { title, label, step } = RANGES[range];
  const start = question[1].start_ms;
  const parts = useMemo(() => partsOf(answer?.result), [answer?.result]);
  const sums = useMemo(() => parts.map((_, at) => parts[0].counts.map((_, bar) => parts.slice(0, at + 1).reduce((sum, each) => sum + each.counts[bar], 0))), [parts]);
  const bars = sums.at(-1);
  const scheme = useScheme();
  useEffect(() => {
    if (!bars) return;
    const draw = () => {
      if (!place.current) return; // it has just gone
      const width = place.current.clientWidth;
      const times = bars.map((_, at) => start + at * step);
      const numbers = parts.map(({ key }) => shades[key] ?? "rest");
      const wanted = `${width} ${scheme} ${range} ${numbers}`, data = [times, ...sums.toReversed()];
      if (plot.current && shape.current === wanted) plot.current.setData(data);
      else {
        plot.current?.destroy();
        shape.current = wanted;
        plot.current = new uPlot(options(width, height, label, numbers), data, place.current);
      }
    };
    draw();
    const watching = new ResizeObserver(draw);
    watching.observe(place.current);
    return () => watching.disconnect();
  }, [bars, start, scheme, range, shades]);
  useEffect(() => () => plot.current?.destroy(), []);
  const total = bars?.reduce((sum, each) => sum + each, 0);
  const most = bars ? bars.indexOf(Math.max(...bars)) : 0;
  const told = !bars ? "" : total
    ? `${title}: ${count(total, "message")}; most, ${number(bars[most])}, from ${label.format(start + most * step)}`
    : `${title}: nothing is due`;
  const rows = (bars ?? []).map((_, at) => ({ from_ms: start + at * step, ...Object.fromEntries(parts.map(({ key, counts }) => [key, counts[at]])) }));
  return (
    <figure class="chart">
      <figcaption><b>{title}</b> <span class="figure">{bars ? short(total) : "…"}</span></figcaption>
      {answer?.reason && <p class="quiet">{answer.reason}</p>}
      <div ref={place} class="plot" role="img" aria-label={told} style={{ minHeight: `${height}px` }} />
      {parts.length > 1 && (
        <ul class="key" aria-hidden="true">
          {parts.map(({ key, title, counts }) => <li key={key}><span class={`swatch shade-${shades[key] ?? "rest"}`} /><span>{title}</span> <b class="figure">{short(counts.reduce((sum, each) => sum + each, 0))}</b></li>)}
        </ul>
      )}
      <details>
        <summary>As a table</summary>
        <Table name={`timeline ${range}`} caption={title} rows={rows} columns={[
          { title: "From", key: "from_ms", time: true },
          ...parts.map(({ key, title }) => ({ title, key, number })),
        ]} />
      </details>
    </figure>
  );
}

function useScheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const read = () => `${dark.matches} ${document.documentElement.dataset.scheme ?? ""}`;
  const [found, setFound] = useState(read);
  useEffect(() => {
    const follow = () => setFound(read());
    dark.addEventListener("change", follow);
    addEventListener("scheme", follow);
    return () => (dark.removeEventListener("change", follow), removeEventListener("scheme", follow));
  }, []);
  return found;
}
