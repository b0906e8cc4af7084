// Dead letters: why each is one; sent back or dropped, one of them or all that are shown.

import { change, link } from "./address.js";
import { ago, count, number, preview, sent, topicName } from "./format.js";
import { Answer, Ask, Table } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

export function Letters({ query }) {
  const { topic = "", reason = "", namespace } = query;
  const given = { ...(topic && { topic }), ...(reason && { reason }), ...(namespace && { namespace }) };
  const [letters] = useWatch([["dead_letter_page", given]]);
  const columns = [
    { title: "Dead since", key: "dead_ms", show: (row) => ago(row.dead_ms) },
    { title: "Topic", key: "topic", wrap: true, show: (row) => <a href={link(["topics", row.topic])}>{topicName(row.topic)}</a> },
    { title: "Subscription", key: "subscription" },
    { title: "Reason", key: "reason", wrap: true, show: (row) => <a href={link(["letters"], { ...query, reason: row.reason })}>{row.reason}</a> },
    { title: "Attempts", key: "attempts", number },
    { title: "Key", key: "key", wrap: true, show: (row) => sent(row).key },
    { title: "Payload", key: "payload", show: (row) => <a class="payload" dir="auto" href={link(["topics", row.dead_letter_topic, "messages", row.position])}>{preview(row)}</a> },
    { title: "", show: (row) => (
      <span class="buttons">
        <Ask label="Send back" name={row.message_id} needs="requeue_dead_letters" title={`Send ${row.message_id} back`} act={() => ask("requeue_dead_letters", { ids: [row.message_id], topic: row.topic })} done="It is due again."><p>Its subscription receives it again, with its attempts from 0.</p></Ask>
        <Ask label="Drop" name={row.message_id} danger needs="purge_dead_letters" title={`Drop ${row.message_id}`} act={() => ask("purge_dead_letters", { ids: [row.message_id], topic: row.topic })} done="It is dropped."><p>The message is gone for good.</p></Ask>
      </span>
    ) },
  ];
  return (
    <>
      <h1>Dead letters</h1>
      <div class="filters">
        <label><span>Topic</span><input value={topic} placeholder="all" onChange={(event) => change({ topic: event.target.value.trim() })} /></label>
        <label><span>Reason</span><input value={reason} placeholder="all" onChange={(event) => change({ reason: event.target.value })} /></label>
      </div>
      <Answer answer={letters}>
        {({ letters: items, more }) => (
          <>
            {more && <p class="quiet">The first {count(items.length, "letter")} are shown.</p>}
            <Table name="dead letters" caption="Dead letters" rows={items.map((each) => ({ ...each, id: each.position + each.dead_letter_topic }))} columns={columns} empty="There are no dead letters."
              actions={items.length > 0 && <>
                <Ask label="Send all back" needs="requeue_dead_letters" title="Send all back" act={() => ask("requeue_dead_letters", given)} done={(done) => `${count(done, "message")} sent back.`}>
                  <p>Each subscription receives its messages again: all {more ? "that are here, more than are shown" : `${number(items.length)} that are shown`}.</p>
                </Ask>
                <Ask label="Drop all" danger needs="purge_dead_letters" title="Drop all" act={() => ask("purge_dead_letters", given)} done={(done) => `${count(done, "message")} dropped.`}>
                  <p>The messages are gone for good: all {more ? "that are here, more than are shown" : `${number(items.length)} that are shown`}.</p>
                </Ask>
              </>} />
          </>
        )}
      </Answer>
    </>
  );
}
