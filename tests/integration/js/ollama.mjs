// Ask the server at argv[2] through Ollama's client, and print what came back.
import { Ollama } from "ollama";

const { url, question, weather, person } = JSON.parse(process.argv[2]);
const ollama = new Ollama({ host: url });
const shared = { model: "demo", options: { temperature: 0 } };
const user = (content) => [{ role: "user", content }];

const whole = await ollama.chat({ ...shared, messages: user(question) });
const parts = [];
for await (const part of await ollama.chat({ ...shared, messages: user(question), stream: true }))
  parts.push(part);

const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const described = { name: "get_weather", description: "Get the weather for a city", parameters: schema };
const tools = [{ type: "function", function: described }];
const messages = user(weather);
const asked = await ollama.chat({ ...shared, messages, tools });
const [call] = asked.message.tool_calls;
const result = JSON.stringify({ degrees: 17, sky: "clear" });
messages.push(asked.message, { role: "tool", content: result, tool_name: call.function.name });
const told = await ollama.chat({ ...shared, messages, tools });

const properties = { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } };
const format = { type: "object", properties, required: ["name", "age", "city"] };
const shaped = await ollama.chat({ ...shared, messages: user(person), format });

const generated = await ollama.generate({ ...shared, prompt: question });
const embedded = await ollama.embed({ model: "demo", input: ["a", "b"] });
let error;
try {
  await ollama.chat({ model: "other", messages: user(question) });
} catch (caught) {
  error = [caught.status_code, caught.message];
}

console.log(
  JSON.stringify({
    whole,
    parts,
    call: call.function,
    told: told.message.content,
    person: JSON.parse(shaped.message.content),
    generated: generated.response,
    lengths: embedded.embeddings.map((vector) => vector.length),
    listed: (await ollama.list()).models.map((model) => model.model),
    loaded: (await ollama.ps()).models.map((model) => model.model),
    capabilities: (await ollama.show({ model: "demo" })).capabilities,
    version: (await ollama.version()).version,
    pulled: (await ollama.pull({ model: "demo" })).status,
    error,
  }),
);
