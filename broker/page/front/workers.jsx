// Workers: what runs, for how long, what failed last and when it is tried again.

import { link } from "./address.js";
import { ago, count, duration, number, topicName } from "./format.js";
import { Answer, Ask, Table } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

export function Workers() {
  const [workers] = useWatch([["workers", {}]]);
  return (
    <>
      <h1>Workers</h1>
      <Answer answer={workers}>
        {(rows) => (
          <>
            {!rows.length && <p class="quiet">No worker is connected. <code>duelog worker MODULE:worker --connect DIR</code> starts one.</p>}
            {rows.map((row) => <Task key={`${row.process} ${row.task} ${row.topic} ${row.subscription}`} row={row} />)}
          </>
        )}
      </Answer>
    </>
  );
}

function Task({ row }) {
  const at = { topic: row.topic, subscription: row.subscription };
  return (
    <section class="card">
      <div class="title">
        <h2>{row.task}</h2>
        {row.paused && <span class="tag">paused</span>}
        {row.paused
          ? <Ask label="Resume" name={row.subscription} needs="resume" title={`Resume ${row.subscription}`} act={() => ask("resume", at)} done="It goes on."><p>Its workers are handed messages again.</p></Ask>
          : <Ask label="Pause" name={row.subscription} needs="pause" title={`Pause ${row.subscription}`} act={() => ask("pause", at)} done="It is paused."><p>Workers of this subscription are handed nothing until it is resumed; what runs goes on.</p></Ask>}
      </div>
      <p class="quiet">
        <a href={link(["topics", row.topic])}>{topicName(row.topic)}</a>, subscription {row.subscription}; process {row.process};
        {" "}{number(row.running.length)} of {number(row.concurrency)} at once; {count(row.acknowledged, "message")} done, {number(row.failed)} failed, {number(row.retrying)} to be tried again
      </p>
      <Table name={`running ${row.task}`} caption={`Running in ${row.task}`} empty="Nothing runs." rows={row.running} columns={[
        { title: "Message", key: "message_id" }, { title: "Running for", key: "for_ms", show: (each) => duration(each.for_ms) },
        { title: "Attempt", key: "attempt", number },
      ]} />
      {row.failures.map((each) => (
        <details key={each.at_ms}>
          <summary>{ago(each.at_ms)}, message {each.message_id}: {each.reason}{each.retry_ms ? `; again ${ago(each.retry_ms)}` : ""}</summary>
          <pre tabIndex={0}>{each.traceback}</pre>
        </details>
      ))}
    </section>
  );
}
