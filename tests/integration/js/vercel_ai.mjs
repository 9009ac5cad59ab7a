// Ask the server at argv[2] through each provider of the Vercel AI SDK, and print what came back.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { url, question, weather, person } = JSON.parse(process.argv[2]);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const options = { supportsStructuredOutputs: true, includeUsage: true };
const compatible = createOpenAICompatible({ name: "servd", baseURL: `${url}/v1`, ...options });
const models = { compatible: compatible("demo"), responses: openai("demo"), chat: openai.chat("demo") };

const found = {};
for (const [name, model] of Object.entries(models)) {
  const shared = { model, temperature: 0 };
  const whole = await generateText({ ...shared, prompt: question });

  const stream = streamText({ ...shared, prompt: question });
  const parts = [];
  for await (const part of stream.textStream) parts.push(part);

  const cities = [];
  const getWeather = tool({
    description: "Get the weather for a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return { degrees: 17, sky: "clear" };
    },
  });
  const tools = { get_weather: getWeather };
  const told = await generateText({ ...shared, prompt: weather, tools, stopWhen: stepCountIs(3) });

  const schema = z.object({ name: z.string(), age: z.number().int(), city: z.string() });
  const shaped = await generateText({ ...shared, prompt: person, output: Output.object({ schema }) });

  found[name] = {
    text: whole.text,
    finish: whole.finishReason,
    tokens: whole.usage.outputTokens,
    parts,
    streamed_tokens: (await stream.usage).outputTokens,
    cities,
    told: told.text,
    person: shaped.output,
  };
}
console.log(JSON.stringify(found));
