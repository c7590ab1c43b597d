/** The page: a poller requests the daemon's state, and each view shows its part of it. */

import { Api, ApiError, Poller } from "./api.js";
import * as charts from "./charts.js";
import { Controls, Notice, askForToken } from "./controls.js";
import { byId, clock, setText } from "./dom.js";
import * as tables from "./tables.js";
import { tiles } from "./tiles.js";

const api = new Api();
const notice = new Notice(byId("notice"));
const poller = new Poller(api, show, onProblem);
const controls = new Controls(byId("controls"), api, notice.say.bind(notice), () => poller.refreshAll());
const views = [
  controls.update.bind(controls),
  tiles(byId("tiles")),
  charts.ribbon(byId("ribbon")),
  charts.lossChart(byId("loss-chart")),
  charts.holdoutCharts(byId("accuracy-chart"), byId("holdout-chart")),
  charts.accuracyMatrix(byId("matrix")),
  charts.forgettingChart(byId("forgetting-chart")),
  tables.shiftTable(byId("shift-table")),
  tables.regimeTable(byId("regime-table"), controls),
  tables.canaryTable(byId("canaries"), byId("canary-table")),
  tables.expertTable(byId("experts"), byId("expert-table")),
  tables.requestTable(byId("request-table")),
  charts.requestChart(byId("request-chart")),
  charts.speedChart(byId("speed-chart")),
  charts.lagChart(byId("lag-chart")),
  tables.deadLetterTables(byId("dead-letters")),
  tables.snapshotTable(byId("snapshots"), controls),
  tables.publicationTables(byId("publication"), byId("publication-table"), controls),
];
let shownAt = null;
let declined = false; // a person who has no token is asked once

/** Show the state. */
function show(state) {
  for (const update of views) update(state);
  notice.problem("");
  shownAt = Date.now();
  const { status } = state;
  document.title = `${status.phase} · streamlearn`;
  setText(byId("identity"), `${status.backbone} · ${status.adapter_preset} · ${status.dtype} on ${status.device}`);
  setText(byId("footer"), `streamlearn ${status.versions.streamlearn ?? ""}, started ${clock(Date.parse(status.started_at))}.
    As of ${clock(shownAt)}. The page is updated while it is visible.`);
}

/** Say why there is nothing new; where reading needs the token, ask for it. */
async function onProblem(error) {
  const needsToken = error instanceof ApiError && error.code === "no_token";
  const since = shownAt === null ? "" : ` Values are from ${clock(shownAt)}.`;
  notice.problem(needsToken ? "This daemon requires its token." : `No answer: ${error.message}.${since}`);
  if (!needsToken || declined || byId("token-dialog").open) return;
  const token = await askForToken(api.hasToken ? "The daemon does not accept this token." : "");
  declined = token === null;
  if (declined) return;
  api.useToken(token);
  await poller.refreshAll();
}

poller.refresh();
