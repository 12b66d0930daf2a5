// Keeps the live page open and prints its state, one line a change, until it has been bad and is good again.
//   node outage.mjs URL BROWSER
import { chromium } from "playwright-core";

const [url, executablePath] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--headless", "--no-sandbox", "--disable-gpu"] });
const page = await browser.newPage();
await page.goto(url);
for (const kind of ["good", "bad", "good"]) {
  await page.locator(`#state.${kind}`, { hasText: kind === "bad" ? "not serving" : "serving" }).waitFor({ timeout: 60_000 });
  console.log(`${kind}: ${await page.textContent("#state")}`);
}
await browser.close();
