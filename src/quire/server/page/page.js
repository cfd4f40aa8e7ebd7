// The page: a chat and a live view, put together.

import { askForKey, follow } from "./api.js";
import { Chat } from "./chat.js";
import { Controls } from "./controls.js";
import { LiveView } from "./live.js";

const chat = new Chat(new Controls(document.getElementById("controls")));
const view = new LiveView();
const unlock = document.getElementById("unlock");
const showEngine = document.getElementById("show-engine");

// On a narrow screen only one of chat and live view is shown.
showEngine.addEventListener("click", () => {
  const shown = document.body.classList.toggle("show-engine");
  showEngine.setAttribute("aria-expanded", String(shown));
});

/** Resolves when the user has entered a key after a click on `unlock`. */
function unlocked() {
  return new Promise((resolve) => {
    const ask = () => askForKey().then(() => {
      unlock.removeEventListener("click", ask);
      resolve();
    }, () => {});
    unlock.addEventListener("click", ask);
  });
}

follow("page/events", {
  onState: (state) => view.connection(state),
  onEvent: (snapshot) => {
    chat.maxLen = snapshot.max_model_len ?? 0;
    if (snapshot.modalities) chat.modalities = snapshot.modalities;
    view.show(snapshot);
  },
  unlocked,
});
