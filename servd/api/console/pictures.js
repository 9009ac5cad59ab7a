// Pictures of messages: chosen, pasted or dropped, and shown beside the text.
import { button, h } from "./dom.js";

const MAX_SIDE = 1024; // pixels; larger pictures are reduced, for this browser keeps 2 MB in all
const MAX_BYTES = 100_000; // a picture that is as small as this stays as it is
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const QUALITY = 0.85;

/** The content of a message, as the API takes it. */
export function contentOf(text, urls) {
  if (!urls.length) return text;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

export const textOf = (content) => (typeof content === "string" ? content
  : content.map((part) => part.text ?? "").join(""));

export const picturesOf = (content) => (typeof content === "string" ? []
  : content.flatMap((part) => part.image_url?.url ?? []));

/** A list of pictures. With `remove`, each has a button that calls it with the picture's index. */
export function thumbnails(urls, label, remove) {
  if (!urls.length) return null;
  return h("ul.pictures", { "aria-label": label }, urls.map((url, i) => h("li", {},
    h("img", { src: url, alt: `Picture ${i + 1}` }),
    remove && button("×", () => remove(i), { "aria-label": `Remove picture ${i + 1}` }))));
}

/** The pictures of a message that is being written. `area` takes those that are pasted or dropped,
 * and `sees` says whether the model reads any. */
export function pictureTray(area, sees) {
  let urls = [];
  const list = h("div", { "aria-live": "polite" });
  const problem = h("p.problem", { role: "alert", hidden: true });
  const input = h("input", { type: "file", accept: TYPES.join(), multiple: true, hidden: true,
    change: () => {
      add(input.files);
      input.value = "";
    } });
  const choose = button("Picture", () => input.click(), { "aria-label": "Add a picture" });
  const tray = { root: h("div", {}, problem, list), choose: [input, choose],
    ready: Promise.resolve(), urls: () => urls, set };

  function set(given) {
    urls = [...given];
    problem.hidden = true;
    list.replaceChildren(thumbnails(urls, "Pictures of the message", remove) ?? "");
  }

  function remove(index) {
    set(urls.filter((_, i) => i !== index));
    (list.querySelectorAll("button")[Math.max(index - 1, 0)] ?? choose).focus();
  }

  function add(files) {
    const all = [...files];
    tray.ready = tray.ready.then(async () => {
      try {
        if (!sees()) throw new Error("This model reads text only: it cannot see pictures.");
        set([...urls, ...await Promise.all(all.map(read))]);
      } catch (error) {
        problem.textContent = error.message;
        problem.hidden = false;
      }
    });
  }

  area.addEventListener("paste", (event) => {
    const data = event.clipboardData;
    if (!data.files.length || data.getData("text/plain")) return; // programs add pictures of texts
    event.preventDefault();
    add(data.files);
  });
  area.addEventListener("dragover", (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  area.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    event.stopPropagation();
    add(event.dataTransfer.files);
  });
  return tray;
}

/** A picture as a data: URL. */
async function read(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read here: use PNG, JPEG, WebP or GIF.`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_BYTES && TYPES.includes(file.type)) return dataUrl(file);
  const canvas = h("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)),
    height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
