// What programs do with pulsar-flex: node flex.js SCENARIO HOST:PORT

const { Producer, Consumer, logLevel } = require("pulsar-flex");

const [scenario, server, jwt] = process.argv.slice(2);
const common = { discoveryServers: [server], jwt, logLevel: logLevel.ERROR };

function fail(reason) {
  console.error(reason);
  process.exit(1);
}

function expect(found, wanted) {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) fail(`${JSON.stringify(found)}, not ${JSON.stringify(wanted)}`);
}

// Messages until there are `count`, each given to `each` beforehand.
function received(consumer, count, each) {
  const found = [];
  return new Promise((resolve) => {
    consumer.run({
      onMessage: async (given) => {
        found.push({ ...given, text: Buffer.from(given.message).toString() });
        await each(given, found.length);
        if (found.length === count) resolve(found);
      },
      autoAck: false,
    });
  });
}

const scenarios = {
  async produceAndConsume() {
    const topic = "persistent://public/default/flex";
    const consumer = new Consumer({ ...common, topic, subscription: "s", subType: Consumer.SUB_TYPES.EXCLUSIVE });
    await consumer.subscribe();
    const producer = new Producer({ ...common, topic, producerAccessMode: Producer.ACCESS_MODES.SHARED });
    await producer.create();
    for (let i = 0; i < 10; i++) await producer.sendMessage({ payload: `m${i}`, properties: { n: `${i}` } });
    const messages = ["a", "b", "c"].map((payload) => ({ payload, properties: { batch: "yes" } }));
    await producer.sendBatch({ messages });
    const found = await received(consumer, 13, ({ ack }) => ack());
    const wanted = [...Array(10).keys()].map((i) => `m${i}`).concat(["a", "b", "c"]);
    expect(found.map((each) => each.text), wanted);
    await producer.close();
    await consumer.unsubscribe();
  },

  async sharedWithNack() {
    const topic = "persistent://public/default/flex-nack";
    const consumer = new Consumer({ ...common, topic, subscription: "s", subType: Consumer.SUB_TYPES.SHARED });
    await consumer.subscribe();
    const producer = new Producer({ ...common, topic, producerAccessMode: Producer.ACCESS_MODES.SHARED });
    await producer.create();
    await producer.sendMessage({ payload: "again", properties: {} });
    const found = await received(consumer, 2, ({ ack }, count) =>
      count === 1 ? ack({ type: Consumer.ACK_TYPES.NEGATIVE }) : ack()
    );
    expect(found.map((each) => each.text), ["again", "again"]);
    expect(found.map((each) => each.redeliveryCount), [0, 1]);
    await consumer.unsubscribe();
  },

  async token() {
    const topic = "persistent://public/default/flex-token";
    const producer = new Producer({ ...common, topic, producerAccessMode: Producer.ACCESS_MODES.EXCLUSIVE });
    await producer.create();
    await producer.sendMessage({ payload: "m", properties: {} });
    await producer.close();
  },
};

setTimeout(() => fail("took too long"), 30_000);
scenarios[scenario]().then(() => process.exit(0), (error) => fail(error && error.stack ? error.stack : error));
