// A conversation with the model.
import { Answer } from "./answer.js";
import { chosenModel, events, json } from "./api.js";
import { conversationList, load, save, titleOf } from "./conversations.js";
import { button, h, problem } from "./dom.js";
import { contentOf, picturesOf, pictureTray, textOf, thumbnails } from "./pictures.js";
import { requestBody, settingsForm } from "./settings.js";

const IDEAS = ["What is servd?", "Name three colours.", "Write a haiku about a library."];

/** `messages` are as the API takes them. */
const newConversation = () => ({ id: Date.now().toString(36), title: "New chat", messages: [] });

export default function playground(root) {
  let conversation = newConversation();
  let turns = []; // what is shown: the number of a message, and an element
  let form;
  let sees = false; // whether the model reads pictures
  let running = null; // an AbortController while an answer comes
  let answering = Promise.resolve(); // until that has ended
  const log = h("div.log", { role: "log", "aria-label": "Conversation" });
  const input = h("textarea", {
    rows: 1, placeholder: "Write a message", "aria-label": "Message",
    keydown: onEnter(() => running || onSend()),
  });
  const sendButton = button("Send", onSend, { class: "primary" });
  const chat = h("div.chat");
  const tray = pictureTray(chat, () => sees);
  const composer = h("div.composer", {}, input, tray.choose, sendButton);
  const notKept = h("p.problem", { role: "alert", hidden: true });
  const list = conversationList(() => conversation, (id) => id === conversation.id && clear());
  const settings = h("details", {}, h("summary", {}, "Settings"));
  const kept = h("details", {}, h("summary", {}, "Conversations"), list.root);
  const restart = button("New chat", clear, { class: "quiet" });
  chat.append(log, h("div.bottom", {}, notKept, tray.root, composer, h("p.hint", {},
    "Enter sends, Shift + Enter begins a new line, Esc stops. ", restart)));
  root.append(chat, h("div.aside", {}, kept, settings));
  const wide = matchMedia("(min-width: 60rem)");
  const unfold = () => (kept.open = settings.open = wide.matches);
  wide.addEventListener("change", unfold);
  unfold();
  const begun = begin();

  async function begin() {
    try {
      const { data } = await json("v1/models");
      const names = chosenModel() ? [chosenModel()] : data.map((model) => model.id);
      const card = data.find((model) => model.id === names[0]);
      sees = card?.input_modalities.includes("image") ?? false;
      for (const control of tray.choose) control.classList.toggle("gone", !sees);
      form = settingsForm(names, card);
      settings.append(form);
      showConversation();
    } catch (error) {
      log.replaceChildren(problem(error));
    }
  }

  async function stop() {
    running?.abort();
    await answering;
  }

  async function clear() {
    await stop();
    conversation = newConversation();
    history.replaceState(null, "", "#/playground");
    if (form) showConversation();
  }

  /** Show the one that is kept as this; without, stay where we are. */
  async function open(id) {
    await begun;
    if (form && id && id !== conversation.id) {
      await stop();
      conversation = load(id) ?? newConversation();
      form.elements.system.value = conversation.system ?? form.elements.system.value;
      showConversation();
    }
    if (conversation.messages.length) addressIt();
    input.focus();
  }

  const addressIt = () => history.replaceState(null, "", `#/playground/${conversation.id}`);

  function showConversation() {
    turns = [];
    const { messages, model } = conversation;
    const ideas = IDEAS.map((idea) => button(idea, () => ask(idea)));
    log.replaceChildren(messages.length ? "" : h("div.empty", {},
      h("h2", {}, form.elements.model.value),
      h("p", {}, "Ask something. Point at a word of the answer to see how sure the model was."),
      h("p.ideas", {}, ideas)));
    messages.forEach((message, i) => {
      if (message.role === "user") addTurn(i, userTurn(message.content, i));
      if (message.role !== "assistant") return;
      const answer = Answer.from(model ?? "Answer", message);
      addTurn(i, answer.root);
      const next = messages.findIndex(({ role }, j) => j > i && role !== "tool");
      close(answer, i, messages.slice(i + 1, next < 0 ? messages.length : next));
    });
    log.scrollTop = log.scrollHeight;
    list.draw();
    notKept.hidden = true;
    input.focus();
  }

  function addTurn(index, element) {
    turns.push({ index, element });
    log.append(element);
  }

  /** Forget a message and all after it. */
  async function cut(index) {
    await stop();
    while (turns.at(-1)?.index >= index) turns.pop().element.remove();
    conversation.messages.length = index;
  }

  function keep() {
    conversation.changed = Date.now();
    conversation.model = form.elements.model.value;
    conversation.system = form.elements.system.value;
    try {
      save(conversation);
      addressIt();
      notKept.hidden = true;
    } catch (error) {
      notKept.textContent = error.message;
      notKept.hidden = false;
    }
    list.draw();
  }

  root.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());

  async function onSend() {
    if (running) return running.abort();
    await tray.ready;
    const text = input.value.trim() && input.value;
    const urls = tray.urls();
    if (running || !form || !(text || urls.length)) return;
    input.value = "";
    tray.set([]);
    ask(text, urls);
  }

  function ask(text, urls = []) {
    const content = contentOf(text, urls);
    const { messages } = conversation;
    if (!messages.length) {
      log.replaceChildren();
      conversation.title = titleOf(text);
    }
    messages.push({ role: "user", content });
    addTurn(messages.length - 1, userTurn(content, messages.length - 1));
    keep();
    return (answering = answer());
  }

  /** What the user wrote; to edit it is to ask again from there. */
  function userTurn(content, index) {
    const body = h("div.text", {}, thumbnails(picturesOf(content), "Pictures"), textOf(content));
    const edit = button("Edit", () => {
      const field = h("textarea", { "aria-label": "Edit the message",
        keydown: onEnter(() => editor.requestSubmit()) });
      const leave = (event) => {
        event?.stopPropagation();
        editor.replaceWith(body);
        edit.hidden = false;
      };
      const editor = h("form.edit", {
        submit: async (event) => {
          event.preventDefault();
          await changed.ready;
          const text = field.value.trim() && field.value;
          if (!text && !changed.urls().length) return;
          await cut(index);
          ask(text, changed.urls());
        },
        keydown: (event) => event.key === "Escape" && leave(event),
      });
      const changed = pictureTray(editor, () => sees);
      editor.append(changed.root, field, h("p.actions", {}, sees && changed.choose,
        button("Cancel", leave), h("button.primary", {}, "Ask again")));
      field.value = textOf(content);
      changed.set(picturesOf(content));
      body.replaceWith(editor);
      edit.hidden = true;
      field.focus();
    }, { class: "quiet" });
    return h("article.turn.user", {}, h("h2", {}, "You"), body, h("p.actions", {}, edit));
  }

  /** Have the conversation continued by the model. */
  async function answer() {
    const { messages } = conversation;
    const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    const follow = () => (log.scrollTop = log.scrollHeight);
    const turn = new Answer(form.elements.model.value, (draw) => {
      const stays = isAtEnd();
      draw();
      if (stays) follow();
    });
    addTurn(messages.length, turn.root);
    follow();
    running = new AbortController();
    sendButton.textContent = "Stop";
    log.setAttribute("aria-busy", "true");
    try {
      turn.body = requestBody(form, messages);
      await receive(turn).catch((error) => {
        if (error.code !== "context_length_exceeded" || form.elements.max_tokens.value) throw error;
        delete turn.body.max_tokens; // to the end of the context: it is near
        return receive(turn);
      });
    } catch (error) {
      if (error.name === "AbortError") turn.finish = "stopped by you";
      else turn.root.append(problem(error));
    } finally {
      running = null;
      sendButton.textContent = "Send";
      log.removeAttribute("aria-busy");
    }
    messages.push(turn.message());
    close(turn, messages.length - 1);
    keep();
    follow();
    input.focus();
  }

  async function receive(turn) {
    for await (const event of events("v1/chat/completions", turn.body, running.signal)) {
      turn.add(event);
    }
  }

  function close(turn, index, results) {
    const again = async () => {
      await cut(index);
      answering = answer();
    };
    turn.close(again, (given) => {
      conversation.messages.push(...given);
      answering = answer();
    }, results);
  }

  return { show: open };
}

/** A listener that does something at Enter, but not within a word that is being put together. */
function onEnter(act) {
  return (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    act();
  };
}
