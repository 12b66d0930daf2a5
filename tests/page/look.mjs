// Opens the live page, sends a prompt, and prints what it saw as one JSON object.
//   node look.mjs URL BROWSER FOLDER light|dark RIDERS [SECONDS OF COUNTING FRAMES]
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [url, executablePath, folder, colorScheme, riders, seconds] = process.argv.slice(2);
const browser = await chromium.launch({
  executablePath,
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const page = await browser.newPage({ viewport: { width: 1400, height: 1150 }, colorScheme, bypassCSP: true });  // for axe alone
const errors = [], requests = [];
page.on("console", (message) => { if (["error", "warning"].includes(message.type())) errors.push(message.text()); });
page.on("pageerror", (error) => errors.push(error.message));
page.on("request", (request) => requests.push(new URL(request.url()).origin));

await page.goto(url);
await page.locator("#state.good").waitFor();
await page.fill("#prompt", "Tell me of a lift.");
await page.fill("#max-tokens", seconds ? "4000" : "150");
await page.fill("#riders", riders);
await page.click("#ride button[type=submit]");
const mine = page.locator("#on-lift tr:has(button.mine)").first();
await mine.waitFor();
const requestId = await mine.getAttribute("data-request");
const steps = Number(await mine.locator("td").nth(2).textContent());
await page.waitForFunction(([id, before]) => {
  const row = document.querySelector(`tr[data-request="${id}"]`);
  return row && Number(row.cells[2].textContent) > before;
}, [requestId, steps]);
let framesPerSecond = null;
if (seconds) {
  framesPerSecond = await page.evaluate((wanted) => new Promise((done) => {
    let frames = 0;
    const began = performance.now();
    requestAnimationFrame(function count(now) {
      frames += 1;
      if (now - began < 1000 * wanted) requestAnimationFrame(count);
      else done(1000 * frames / (now - began));
    });
  }), Number(seconds));
}
await page.waitForFunction(() => document.querySelectorAll("#itl .line").length > 0);
await page.screenshot({ path: `${folder}/${colorScheme}.png` });
if (seconds) await page.click("#stop");
await page.waitForFunction(() => /tokens in|stopped/.test(document.getElementById("ride-state").textContent));
await page.waitForFunction((id) => !document.querySelector(`tr[data-request="${id}"]`), requestId);
await page.evaluate(readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8"));
const axe = await page.evaluate(() => window.axe.run());
await page.evaluate((id) => import("/page/story.js").then((story) => story.openStory({ requestId: id })), requestId);
await page.locator("#story-line li").first().waitFor();
const story = await page.locator("#story-line li b").allTextContents();
await page.keyboard.press("Escape");
await page.evaluate(() => document.activeElement.blur());  // else Space presses the button that has the focus
await page.keyboard.press("Space");
const frozen = await page.getAttribute("#freeze", "aria-pressed");
console.log(JSON.stringify({
  errors, frozen, story, framesPerSecond, origins: [...new Set(requests)],
  answer: await page.locator("#answer").textContent(), state: await page.textContent("#ride-state"),
  lifts: await page.locator(".lift").count(),
  serious: axe.violations.filter((one) => ["serious", "critical"].includes(one.impact)).map((one) => `${one.id}: ${one.nodes[0].html}`),
}));
await browser.close();
