// The store at a glance: what is due when, what comes and goes, what it takes.

import { useEffect, useState } from "preact/hooks";
import { change, link } from "./address.js";
import { ago, bytes, count, duration, number, short } from "./format.js";
import { Answer, Figure, Gauge, useMay } from "./parts.jsx";
import { ask, useWatch } from "./server.js";
import { RANGES, Timeline, useShades, useTimeline } from "./timeline.jsx";

const PARTS = { partitions: "Partitions", main: "Main", wal: "Log", attempts: "Deliveries", other: "Other" };

export function Timelines({ answers, questions }) {
  const shades = useShades(answers);
  return (
    <div class="charts">
      {Object.keys(RANGES).map((range, at) => (
        <div class="card" key={range}><Timeline range={range} question={questions[at]} answer={answers[at]} shades={shades} /></div>
      ))}
    </div>
  );
}

/** The questions of all ranges: of one topic, of all, or of those that have most apart. */
export const useTimelines = (topic, apart) => Object.keys(RANGES).map((range) => useTimeline(range, topic, apart));

/** Tell how far the first count of a large store is, which goes on as it is asked: `complete` by what the view shows. */
export function Counting({ complete }) {
  const may = useMay()("overview");
  const [found, setFound] = useState();
  useEffect(() => {
    if (complete || !may) return;
    const look = () => ask("overview").then(setFound, () => {});
    look();
    const timer = setInterval(look, 1000);
    return () => clearInterval(timer);
  }, [complete, may]);
  if (complete) return null;
  return (
    <p class="note" role="status">
      {found && <progress max={found.partitions || 1} value={found.partitions_counted} aria-label="Counted" />}
      <span>{found ? `${number(found.partitions_counted)} of ${count(found.partitions, "partition")} are counted since the store was opened: what is pending is of those.` : "The store is being counted."}</span>
    </p>
  );
}

function Disk({ parts, total }) {
  const told = Object.entries(PARTS).filter(([name]) => parts[name]);
  return (
    <section class="card">
      <h2>Disk <span class="figure">{bytes(total)}</span></h2>
      <svg class="share" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">
        {told.map(([name], at) => {
          const before = told.slice(0, at).reduce((sum, [each]) => sum + parts[each], 0);
          return <rect class={`part-${at}`} x={(before / total) * 100} width={(parts[name] / total) * 100} height="6" />;
        })}
      </svg>
      <dl class="legend">
        {told.map(([name, title], at) => (
          <div><dt><span class={`swatch part-${at}`} />{title}</dt><dd class="figure">{bytes(parts[name])}</dd></div>
        ))}
      </dl>
    </section>
  );
}

export function Overview({ query }) {
  const may = useMay();
  const apart = query.by === "topic" && may("timeline_by_topic");
  const questions = useTimelines(undefined, apart);
  const [overview, connections, ...answers] = useWatch([["overview", {}], ["connections", { listed: false }], ...questions]);
  return (
    <>
      <div class="title">
        <h1>Overview</h1>
        {may("timeline_by_topic") && (
          <div class="tabs" role="group" aria-label="Bars">
            <button aria-pressed={!apart} onClick={() => change({ by: "" })}>Together</button>
            <button aria-pressed={apart} onClick={() => change({ by: "topic" })}>By topic</button>
          </div>
        )}
      </div>
      <Answer answer={overview}>
        {(found) => (
          <>
            {found.suspended.map((each) => <p class="problem" role="alert">Upkeep has failed and is tried again: {each}</p>)}
            <Counting complete={found.complete} />
            <dl class="figures">
              <Figure name="Pending" value={short(found.pending)} note={`in ${count(found.topics, "topic")}`} />
              <Figure name="Backlog" value={found.complete ? short(found.backlog) : "…"} alert={found.backlog > 0 && found.consumers === 0}
                note={!found.complete ? "being counted" : found.oldest_due_ms ? `oldest due ${ago(found.oldest_due_ms)}` : "all is acknowledged"} />
              <Figure name="In" value={`${short(found.sent_per_s)} /s`} note={`${short(found.sent)} since the start`} />
              <Figure name="Out" value={`${short(found.received_per_s)} /s`} note={`${short(found.received)} since the start`} />
              <Figure name="Lateness" value={duration(found.late_median_ms)} note={`99 %: ${duration(found.late_99_ms)}`} />
              <Figure name="Died" value={short(found.dead_lettered)} note={<>since the start; <a href={link(["letters"])}>letters</a></>} />
            </dl>
          </>
        )}
      </Answer>
      <Timelines answers={answers} questions={questions} />
      {overview?.result && (
        <div class="pair">
          <Disk parts={overview.result.disk_parts} total={overview.result.disk_bytes} />
          <section class="card">
            <h2>In use</h2>
            <dl class="legend">
              <div><dt>Memory of delay indexes</dt><dd class="figure">{bytes(overview.result.index_bytes)}</dd></div>
              <div><dt>Partitions on disk</dt><dd class="figure">{number(overview.result.partitions)}</dd></div>
              <div><dt>Open at once</dt><dd class="figure">{number(overview.result.open_partitions)} of at most {number(overview.result.max_open_partitions)}</dd></div>
              <div><dt>Partitions in memory</dt><dd class="figure">{number(overview.result.loaded_partitions)}</dd></div>
              {connections?.result && <div><dt>Other programs connected</dt><dd class="figure">{number(connections.result.total)}</dd></div>}
              <div><dt>Subscriptions, consumers</dt><dd class="figure">{number(overview.result.subscriptions)}, {number(overview.result.consumers)}</dd></div>
              <div><dt>Handed out, not acknowledged</dt><dd class="figure">{number(overview.result.unacknowledged)}</dd></div>
              <div><dt>Delivered again</dt><dd class="figure">{number(overview.result.redelivered)}</dd></div>
            </dl>
            {connections?.result?.limits.map((each) => <Gauge key={each.name} {...each} show={bytes} />)}
          </section>
        </div>
      )}
    </>
  );
}
