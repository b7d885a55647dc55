<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="en_US">
<context>
    <name>BaseDialog</name>
    <message numerus="yes">
        <source>Searching this PC… %n base(s) so far.</source>
        <translation>
            <numerusform>Searching this PC… %n base so far.</numerusform>
            <numerusform>Searching this PC… %n bases so far.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n base(s) on this PC.</source>
        <translation>
            <numerusform>%n base on this PC.</numerusform>
            <numerusform>%n bases on this PC.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n unusable file(s): search for one to see why.</source>
        <translation>
            <numerusform>%n unusable file: search for one to see why.</numerusform>
            <numerusform>%n unusable files: search for one to see why.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>BulkDialog</name>
    <message numerus="yes">
        <source>Checking %n caption(s)…</source>
        <translation>
            <numerusform>Checking %n caption…</numerusform>
            <numerusform>Checking %n captions…</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Changes {count} of %n caption(s)</source>
        <translation>
            <numerusform>Changes {count} of %n caption</numerusform>
            <numerusform>Changes {count} of %n captions</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Change %n caption(s)</source>
        <translation>
            <numerusform>Change %n caption</numerusform>
            <numerusform>Change %n captions</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>CaptionEditor</name>
    <message numerus="yes">
        <source>+%n more tag(s)</source>
        <translation>
            <numerusform>+%n more tag</numerusform>
            <numerusform>+%n more tags</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>ChartsView</name>
    <message numerus="yes">
        <source>%n bucket(s) at {side} px</source>
        <translation>
            <numerusform>%n bucket at {side} px</numerusform>
            <numerusform>%n buckets at {side} px</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>ConflictsDialog</name>
    <message numerus="yes">
        <source>Apply to all %n conflicts</source>
        <translation>
            <numerusform>Apply to all %n conflicts</numerusform>
            <numerusform>Apply to all %n conflicts</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>Counts</name>
    <message numerus="yes">
        <source>Compute %n image(s) at a time</source>
        <translation>
            <numerusform>Compute %n image at a time</numerusform>
            <numerusform>Compute %n images at a time</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n image(s) at once</source>
        <translation>
            <numerusform>%n image at once</numerusform>
            <numerusform>%n images at once</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n image(s) one at a time</source>
        <translation>
            <numerusform>%n image one at a time</numerusform>
            <numerusform>%n images one at a time</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n block(s) with gradient checkpointing</source>
        <translation>
            <numerusform>%n block with gradient checkpointing</numerusform>
            <numerusform>%n blocks with gradient checkpointing</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n epoch(s)</source>
        <translation>
            <numerusform>%n epoch</numerusform>
            <numerusform>%n epochs</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n time(s)</source>
        <translation>
            <numerusform>%n time</numerusform>
            <numerusform>%n times</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n square image(s)</source>
        <translation>
            <numerusform>%n square image</numerusform>
            <numerusform>%n square images</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n preview prompt(s)</source>
        <translation>
            <numerusform>%n preview prompt</numerusform>
            <numerusform>%n preview prompts</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>EditorTexts</name>
    <message numerus="yes">
        <source>%n image(s)</source>
        <translation>
            <numerusform>%n image</numerusform>
            <numerusform>%n images</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>The filter hides %n selected image(s), which will not be changed.</source>
        <translation>
            <numerusform>The filter hides %n selected image, which will not be changed.</numerusform>
            <numerusform>The filter hides %n selected images, which will not be changed.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n without a caption file</source>
        <translation>
            <numerusform>%n without a caption file</numerusform>
            <numerusform>%n without a caption file</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n with an empty caption</source>
        <translation>
            <numerusform>%n with an empty caption</numerusform>
            <numerusform>%n with an empty caption</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n excluded</source>
        <translation>
            <numerusform>%n excluded</numerusform>
            <numerusform>%n excluded</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n damaged</source>
        <translation>
            <numerusform>%n damaged</numerusform>
            <numerusform>%n damaged</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>{count} of {limit} tokens, %n truncated</source>
        <translation>
            <numerusform>{count} of {limit} tokens, %n truncated</numerusform>
            <numerusform>{count} of {limit} tokens, %n truncated</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n alternative caption(s), one per line.</source>
        <translation>
            <numerusform>%n alternative caption, one per line.</numerusform>
            <numerusform>%n alternative captions, one per line.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n line(s), read as one caption.</source>
        <translation>
            <numerusform>%n line, read as one caption.</numerusform>
            <numerusform>%n lines, read as one caption.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>FailureBanner</name>
    <message numerus="yes">
        <source>%n later step(s) will be repeated.</source>
        <translation>
            <numerusform>%n later step will be repeated.</numerusform>
            <numerusform>%n later steps will be repeated.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>FilterBox</name>
    <message numerus="yes">
        <source>%n image(s)</source>
        <translation>
            <numerusform>%n image</numerusform>
            <numerusform>%n images</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>FolderRow</name>
    <message numerus="yes">
        <source>%Ln image(s)</source>
        <translation>
            <numerusform>%Ln image</numerusform>
            <numerusform>%Ln images</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>FolderRows</name>
    <message numerus="yes">
        <source>{folder} (%Ln image(s))</source>
        <translation>
            <numerusform>{folder} (%Ln image)</numerusform>
            <numerusform>{folder} (%Ln images)</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>Grid</name>
    <message numerus="yes">
        <source>%n star(s)</source>
        <translation>
            <numerusform>%n star</numerusform>
            <numerusform>%n stars</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>HealthChart</name>
    <message numerus="yes">
        <source>%n image(s)</source>
        <translation>
            <numerusform>%n image</numerusform>
            <numerusform>%n images</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>HealthPanel</name>
    <message numerus="yes">
        <source>%n image(s) selected</source>
        <translation>
            <numerusform>%n image selected</numerusform>
            <numerusform>%n images selected</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Checking %n more</source>
        <translation>
            <numerusform>Checking %n more</numerusform>
            <numerusform>Checking %n more</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>ImageImporter</name>
    <message numerus="yes">
        <source>Copied %n image(s) into {folder}.</source>
        <translation>
            <numerusform>Copied %n image into {folder}.</numerusform>
            <numerusform>Copied %n images into {folder}.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Skipped %n file(s).</source>
        <translation>
            <numerusform>Skipped %n file.</numerusform>
            <numerusform>Skipped %n files.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>ImageViews</name>
    <message numerus="yes">
        <source>Restored %n image(s) from the trash.</source>
        <translation>
            <numerusform>Restored %n image from the trash.</numerusform>
            <numerusform>Restored %n images from the trash.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>JobSheet</name>
    <message numerus="yes">
        <source>%Ln setting(s) changed</source>
        <translation>
            <numerusform>%Ln setting changed</numerusform>
            <numerusform>%Ln settings changed</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%Ln setting(s) differ from “{preset}”</source>
        <translation>
            <numerusform>%Ln setting differ from “{preset}”</numerusform>
            <numerusform>%Ln settings differ from “{preset}”</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>LoraViewer</name>
    <message numerus="yes">
        <source>%n setting(s) not given: the job's values are used.</source>
        <translation>
            <numerusform>%n setting not given: the job's values are used.</numerusform>
            <numerusform>%n settings not given: the job's values are used.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>PreflightList</name>
    <message numerus="yes">
        <source>and %n more</source>
        <translation>
            <numerusform>and %n more</numerusform>
            <numerusform>and %n more</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>PresetHeading</name>
    <message numerus="yes">
        <source>%n example prompt(s)</source>
        <translation>
            <numerusform>%n example prompt</numerusform>
            <numerusform>%n example prompts</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>ProgressPanel</name>
    <message numerus="yes">
        <source>%n step(s)</source>
        <translation>
            <numerusform>%n step</numerusform>
            <numerusform>%n steps</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>ProposalModel</name>
    <message numerus="yes">
        <source>%n image(s)</source>
        <translation>
            <numerusform>%n image</numerusform>
            <numerusform>%n images</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>QueuePanel</name>
    <message numerus="yes">
        <source>Interrupted in the queue: %n job(s).</source>
        <translation>
            <numerusform>Interrupted in the queue: %n job.</numerusform>
            <numerusform>Interrupted in the queue: %n jobs.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>RecoveredDialog</name>
    <message numerus="yes">
        <source>Impasto stopped before it could save %n change(s). Files that have not changed since are saved now.</source>
        <translation>
            <numerusform>Impasto stopped before it could save %n change. Files that have not changed since are saved now.</numerusform>
            <numerusform>Impasto stopped before it could save %n changes. Files that have not changed since are saved now.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>RestoreDialog</name>
    <message numerus="yes">
        <source>%n caption file(s) changed since the first edit in Impasto.</source>
        <translation>
            <numerusform>%n caption file changed since the first edit in Impasto.</numerusform>
            <numerusform>%n caption files changed since the first edit in Impasto.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Restore all %n</source>
        <translation>
            <numerusform>Restore all %n</numerusform>
            <numerusform>Restore all %n</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Restore %n selected</source>
        <translation>
            <numerusform>Restore %n selected</numerusform>
            <numerusform>Restore %n selected</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Restored %n caption file(s).</source>
        <translation>
            <numerusform>Restored %n caption file.</numerusform>
            <numerusform>Restored %n caption files.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>RunHeader</name>
    <message numerus="yes">
        <source>%n step(s) skipped</source>
        <translation>
            <numerusform>%n step skipped</numerusform>
            <numerusform>%n steps skipped</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>SaveStatusPanel</name>
    <message numerus="yes">
        <source>Another program changed %n value(s) that you changed too.</source>
        <translation>
            <numerusform>Another program changed %n value that you changed too.</numerusform>
            <numerusform>Another program changed %n values that you changed too.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Converted %n caption(s) in {folder} from another encoding to UTF-8.</source>
        <translation>
            <numerusform>Converted %n caption in {folder} from another encoding to UTF-8.</numerusform>
            <numerusform>Converted %n captions in {folder} from another encoding to UTF-8.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>metadata.jsonl of {folder} has %n caption(s).</source>
        <translation>
            <numerusform>metadata.jsonl of {folder} has %n caption.</numerusform>
            <numerusform>metadata.jsonl of {folder} has %n captions.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Impasto stopped before it could save %n change(s) in {folder}.</source>
        <translation>
            <numerusform>Impasto stopped before it could save %n change in {folder}.</numerusform>
            <numerusform>Impasto stopped before it could save %n changes in {folder}.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Not saved when you closed Impasto: %n change(s) in {folder}.</source>
        <translation>
            <numerusform>Not saved when you closed Impasto: %n change in {folder}.</numerusform>
            <numerusform>Not saved when you closed Impasto: %n changes in {folder}.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Saved now: %n.</source>
        <translation>
            <numerusform>Saved now: %n.</numerusform>
            <numerusform>Saved now: %n.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Also changed by another program and waiting for your choice: %n.</source>
        <translation>
            <numerusform>Also changed by another program and waiting for your choice: %n.</numerusform>
            <numerusform>Also changed by another program and waiting for your choice: %n.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Still not saved: %n.</source>
        <translation>
            <numerusform>Still not saved: %n.</numerusform>
            <numerusform>Still not saved: %n.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>StatusBar</name>
    <message numerus="yes">
        <source>Not saved yet: %n change(s)</source>
        <translation>
            <numerusform>Not saved yet: %n change</numerusform>
            <numerusform>Not saved yet: %n changes</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Waiting for your choice: %n change(s)</source>
        <translation>
            <numerusform>Waiting for your choice: %n change</numerusform>
            <numerusform>Waiting for your choice: %n changes</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Saving %n change(s)…</source>
        <translation>
            <numerusform>Saving %n change…</numerusform>
            <numerusform>Saving %n changes…</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n image(s)</source>
        <translation>
            <numerusform>%n image</numerusform>
            <numerusform>%n images</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>%n selected</source>
        <translation>
            <numerusform>%n selected</numerusform>
            <numerusform>%n selected</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>TagModel</name>
    <message numerus="yes">
        <source>%1, %n image(s)</source>
        <translation>
            <numerusform>%1, %n image</numerusform>
            <numerusform>%1, %n images</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>TagPanel</name>
    <message numerus="yes">
        <source>%n tag(s)</source>
        <translation>
            <numerusform>%n tag</numerusform>
            <numerusform>%n tags</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>ToolsPanel</name>
    <message numerus="yes">
        <source>%n base(s)</source>
        <translation>
            <numerusform>%n base</numerusform>
            <numerusform>%n bases</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>TrainPage</name>
    <message numerus="yes">
        <source>The filter hides %Ln image(s), which training will use anyway.</source>
        <translation>
            <numerusform>The filter hides %Ln image, which training will use anyway.</numerusform>
            <numerusform>The filter hides %Ln images, which training will use anyway.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>TrashStep</name>
    <message numerus="yes">
        <source>Moved %n image(s) to the trash.</source>
        <translation>
            <numerusform>Moved %n image to the trash.</numerusform>
            <numerusform>Moved %n images to the trash.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Could not move %n image(s) to the trash: {names}.</source>
        <translation>
            <numerusform>Could not move %n image to the trash: {names}.</numerusform>
            <numerusform>Could not move %n images to the trash: {names}.</numerusform>
        </translation>
    </message>
    <message numerus="yes">
        <source>Could not restore %n file(s): {names}.</source>
        <translation>
            <numerusform>Could not restore %n file: {names}.</numerusform>
            <numerusform>Could not restore %n files: {names}.</numerusform>
        </translation>
    </message>
</context>
<context>
    <name>Window</name>
    <message numerus="yes">
        <source>Another program changed %n value(s) that you changed too.</source>
        <translation>
            <numerusform>Another program changed %n value that you changed too.</numerusform>
            <numerusform>Another program changed %n values that you changed too.</numerusform>
        </translation>
    </message>
</context>
</TS>
