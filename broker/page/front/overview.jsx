// The store at a glance: what is due when, what comes and goes, what it takes.

import { link } from "./address.js";
import { ago, bytes, count, duration, number, short } from "./format.js";
import { Answer, Figure } from "./parts.jsx";
import { useWatch } from "./server.js";
import { RANGES, Timeline, useTimeline } from "./timeline.jsx";

const PARTS = { partitions: "Partitions", main: "Main", wal: "Log", attempts: "Deliveries", other: "Other" };

export function Timelines({ topic, answers, questions }) {
  return (
    <div class="charts">
      {Object.keys(RANGES).map((range, at) => (
        <div class="card" key={range}><Timeline range={range} question={questions[at]} answer={answers[at]} topic={topic} /></div>
      ))}
    </div>
  );
}

/** The questions of all ranges, of one topic or of all. */
export const useTimelines = (topic) => Object.keys(RANGES).map((range) => useTimeline(range, topic));

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

export function Overview() {
  const questions = useTimelines();
  const [overview, ...answers] = useWatch([["overview", {}], ...questions]);
  return (
    <>
      <h1>Overview</h1>
      <Answer answer={overview}>
        {(found) => (
          <>
            {found.suspended.map((each) => <p class="problem" role="alert">Upkeep has failed and is tried again: {each}</p>)}
            {!found.complete && (
              <p class="quiet" role="status">Counting: {found.partitions_counted} of {count(found.partitions, "partition")}, then topics</p>
            )}
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
              <div><dt>Open, in memory</dt><dd class="figure">{overview.result.open_partitions}, {overview.result.loaded_partitions}</dd></div>
              <div><dt>Subscriptions, consumers</dt><dd class="figure">{number(overview.result.subscriptions)}, {number(overview.result.consumers)}</dd></div>
              <div><dt>Handed out, not acknowledged</dt><dd class="figure">{number(overview.result.unacknowledged)}</dd></div>
              <div><dt>Delivered again</dt><dd class="figure">{number(overview.result.redelivered)}</dd></div>
            </dl>
          </section>
        </div>
      )}
    </>
  );
}
