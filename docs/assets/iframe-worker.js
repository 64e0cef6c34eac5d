"use strict";
// Search in pages that a file manager opens: there a browser starts no worker, so the search runs
// in a hidden frame. The theme's worker looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) => new Promise((done) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = done;
        inside.document.body.append(script);
      });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce((done, each) => done.then(() => load(each)), Promise.resolve());
      const ready = load(url);
      this.postMessage = (data) => ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
