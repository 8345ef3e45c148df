"""The words and sentences of synthetic documents."""

KEYS = tuple(
    "adam agnes alan alma amos anna arlo avery bella boris bruno carla cecil celia clara cyrus daisy dora edgar elena elias"
    " emma ernst esther fabio felix fiona flora frank freya george gina grace greta harold hazel hector helga hugo ida igor"
    " irene isaac ivy jacob joan jonas julia karl klara lars laura leon lily lucas mabel marco maria max mila nora oscar otto"
    " paula".split()
)
VALUES = tuple(
    "amber anchor apple arrow badge basil beacon birch blade blanket bottle bridge button cable candle canyon carbon castle"
    " cedar cherry cinder clover cobalt copper coral cotton crystal dagger desert ember falcon feather fossil garnet ginger"
    " glacier granite hammer harbor helmet island ivory jacket jasmine kettle ladder lantern lemon magnet marble meadow mirror"
    " needle nickel oyster paper pebble pepper pillow prism quartz ribbon saddle silver".split()
)
FILLER = (
    "The river runs past the old mill and on to the sea.",
    "Rain fell on the hills for most of the week.",
    "A train leaves the station every hour, and few people take it.",
    "The shop at the corner sells bread, salt and tea.",
    "Nobody knew who had planted the trees along the road.",
    "In winter the lake is frozen and the boats stay ashore.",
    "The clock in the tower has been slow for years.",
    "Birds gather on the roof before they fly south.",
    "The path turns left behind the barn and climbs to the pass.",
    "Every spring the fields are green again within days.",
    "An old map of the coast hangs in the hall.",
    "The wind was cold, so they closed the window.",
)
